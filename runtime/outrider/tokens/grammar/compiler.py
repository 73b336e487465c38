"""Compiles grammars for a bundle's tokenizer."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Lock, Semaphore, Thread
from typing import TYPE_CHECKING

from outrider.errors import BundleError, EngineClosed, OptionError, needs
from outrider.system.files import reading
from outrider.system.guard import is_interrupt
from outrider.tokens.grammar.child import GrammarVerdict, Start
from outrider.tokens.grammar.limits import GrammarLimits, check_length
from outrider.tokens.grammar.matcher import new_matcher, new_tokenizer
from outrider.tokens.grammar.state import GrammarState, first_line
from outrider.tokens.grammar.trials import POLL_SECONDS, ClientLeft, NoChild, Trials

if TYPE_CHECKING:
    from pathlib import Path

    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from outrider.tokens.grammar.source import GrammarSource

TOKENIZER_FILE = "tokenizer.json"
_KEPT_GRAMMARS = 32  # compiled grammars
_KEPT_BYTES = 512 << 20  # bytes of compiled grammars, as far as they were tried
_KEPT_REFUSALS = 256
_NUM_THREADS = 2  # where event loops have grammars compiled
_NUM_UNTRIED = 2  # grammars that are compiled at a time where no other process can be started
_LONGEST_CHARACTERS = 80  # characters of a grammar in a message
_SIMPLIFY = "Simplify it: intersect fewer patterns, and repeat fewer times."

_LEFT = "The grammar is not compiled: its client has left. Send the request again."

log = logging.getLogger("outrider")


class _Entry:
    """A place for a compiled grammar. lock: taken to compile it, so that this is done once. memory: bytes it took."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.base: LLMatcher | None = None
        self.memory = 0
        self.is_slow = False


class Grammars:
    """Compiles the grammars of an engine's requests.

    folder: has the tokenizer as Hugging Face's tokenizer.json, which is read when the first grammar is compiled.
    vocab_size: the main model's. eos_token_ids: every token that ends an answer. limits: of a grammar. From any thread.

    A grammar that is not certain to be cheap is tried in another process first, which is ended at a limit. What passes
    is compiled again here: its cost is known then, as llguidance has no compiled form that can be sent.

    threads: where event loops have grammars compiled. A slow one takes seconds, in which the loop's own threads are
    for requests without a grammar, and with one that is compiled.
    """

    def __init__(
        self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], limits: GrammarLimits | None = None
    ) -> None:
        self._path = folder / TOKENIZER_FILE
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        self.limits = limits or GrammarLimits()
        self._lock = Lock()
        self._tools: tuple[LLTokenizer, LLExecutor] | None = None
        self._entries: OrderedDict[GrammarSource, _Entry] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._untried = Semaphore(_NUM_UNTRIED)
        self.trials = Trials(Start(str(self._path.absolute()), vocab_size, eos_token_ids), self.limits)
        self.threads = ThreadPoolExecutor(_NUM_THREADS, "outrider grammars")

    def close(self) -> None:
        """End the threads and processes. Grammars that were not begun are not compiled."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.trials.close()

    def is_quick(self, source: GrammarSource) -> bool:
        """Whether `new_state` returns at once: the grammar is compiled, refused, or certain to be cheap."""
        with self._lock:
            entry = self._entries.get(source)
            return source.is_cheap or _key(source) in self._refused or (entry is not None and entry.base is not None)

    def new_state(self, source: GrammarSource, gone: Event | None = None) -> GrammarState:
        """The state of an answer that begins. gone: is set when nobody waits for it any more.

        Raises:
            OptionError: when llguidance is not installed, or does not take the grammar, or the grammar passes a limit.
            BundleError: when the bundle's tokenizer cannot be used.
            EngineClosed: when these were closed before it was compiled.
        """
        with self._lock:
            tokenizer, executor = self._tools = self._tools or self._load(source.option)
            entry = self._entries.setdefault(source, _Entry())
            self._entries.move_to_end(source)
            self._evict()
        while not entry.lock.acquire(timeout=POLL_SECONDS):  # of this grammar alone: others do not wait
            if gone is not None and gone.is_set():
                raise OptionError(_LEFT)
        try:
            base = entry.base or self._compile(tokenizer, source, entry, gone)
            given = self._vocab_size, self._eos_token_ids, source.option
            return GrammarState(base, executor, *given, limits=self.limits, is_slow=entry.is_slow)
        finally:
            entry.lock.release()

    def _compile(self, tokenizer: LLTokenizer, source: GrammarSource, entry: _Entry, gone: Event | None) -> LLMatcher:
        """Compile a grammar, after a trial where its cost is not known. A refusal is kept."""
        with self._lock:
            if (known := self._refused.get(_key(source))) is not None:
                raise OptionError(known)
        try:
            _check(source)
            base = _compile(tokenizer, source) if source.is_cheap else self._try(tokenizer, source, entry, gone)
        except ClientLeft as left:
            raise (EngineClosed() if self.trials.closed else OptionError(_LEFT)) from left
        except OptionError as found:
            error = self._named(tokenizer, source, entry, gone) or found
            with self._lock:
                self._refused[_key(source)] = str(error)
                if len(self._refused) > _KEPT_REFUSALS:
                    self._refused.popitem(last=False)
            raise error from found
        with self._lock:
            entry.base = base
            self._evict()
        return base

    def _named(
        self, tokenizer: LLTokenizer, source: GrammarSource, entry: _Entry, gone: Event | None
    ) -> OptionError | None:
        """The error of a grammar for tools that names the first function whose schema is refused."""
        for name, schema in source.parts:
            part = replace(source, option="json_schema", text=schema, before="", parts=())
            try:
                _check(part)
                _ = _compile(tokenizer, part) if part.is_cheap else self._try(tokenizer, part, entry, gone)
            except OptionError as error:
                wrong = str(error).partition(" cannot be followed: ")[2] or str(error)
                return OptionError(f"tools cannot be followed: in {name!r}, {wrong}")
            except ClientLeft:
                return None
        return None

    def _try(self, tokenizer: LLTokenizer, source: GrammarSource, entry: _Entry, gone: Event | None) -> LLMatcher:
        limits = self.limits
        try:
            verdict = self.trials.check(source, gone)
        except NoChild as error:
            log.warning("Grammars are compiled without a limit of memory: %s.", error)
            return self._compile_untried(tokenizer, source)
        if reason := beyond(verdict, limits):
            raise refusal(source, reason, _SIMPLIFY)
        if verdict.error:
            raise refusal(source, verdict.error)
        entry.memory, entry.is_slow = verdict.memory, verdict.mask_seconds > limits.slow_seconds
        return _compile(tokenizer, source)

    def _compile_untried(self, tokenizer: LLTokenizer, source: GrammarSource) -> LLMatcher:
        """Compile in a thread that is left to itself after the time limit. Few may run: nothing ends them."""
        if not self._untried.acquire(blocking=False):
            raise refusal(source, f"{_NUM_UNTRIED} others are still being compiled", "Try again later.")
        made: list[LLMatcher | BaseException] = []

        def make() -> None:
            try:
                made.append(_compile(tokenizer, source))
            except BaseException as error:
                made.append(error)
            finally:
                self._untried.release()

        thread = Thread(target=make, daemon=True)
        thread.start()
        thread.join(self.limits.compile_seconds)
        if not made:
            raise refusal(source, beyond(GrammarVerdict(beyond="seconds"), self.limits), _SIMPLIFY)
        if isinstance(made[0], BaseException):
            raise made[0]
        return made[0]

    def _evict(self) -> None:
        """Delete the oldest grammars beyond what is kept; not the newest."""
        while len(self._entries) > 1 and (
            len(self._entries) > _KEPT_GRAMMARS or sum(each.memory for each in self._entries.values()) > _KEPT_BYTES
        ):
            self._entries.popitem(last=False)

    def _load(self, option: str) -> tuple[LLTokenizer, LLExecutor]:
        with needs(f"{option} needs the package llguidance", "structured", OptionError):
            from llguidance import LLExecutor
        if not self._path.is_file():
            raise BundleError(
                f"{option} needs the tokenizer as {self._path}, and the bundle has no such file. Export it again from "
                f"a checkpoint that has a {TOKENIZER_FILE}."
            )
        with reading(str(self._path), "Export the bundle again.", BundleError):
            text = self._path.read_text(encoding="utf-8")
        try:
            tokenizer = new_tokenizer(text, self._vocab_size, self._eos_token_ids)
        except ValueError as error:
            raise BundleError(
                f"{option} cannot be used with the tokenizer {self._path}: {first_line(str(error))}. Leave the option "
                "out."
            ) from error
        return tokenizer, LLExecutor()


def beyond(verdict: GrammarVerdict, limits: GrammarLimits) -> str:
    """Which limit a trial has passed, in words; "" for none."""
    if verdict.beyond == "memory":
        return f"compiling it takes more than {limits.compile_memory >> 20:,} MB of memory, the limit"
    if verdict.beyond == "process":
        return "the process that compiles it ends, as one does that has no memory left"
    if verdict.beyond:
        return f"compiling it takes more than {limits.compile_seconds:g} seconds, the limit"
    if verdict.mask_seconds > limits.mask_seconds:
        return (
            f"finding the tokens that may come next takes {verdict.mask_seconds:.1f} seconds, and the limit is "
            f"{limits.mask_seconds:g}"
        )
    return ""


def refusal(source: GrammarSource, reason: str, next_step: str = "") -> OptionError:
    """The error for a grammar that cannot be followed."""
    text = source.text
    shown = text if len(text) <= _LONGEST_CHARACTERS else f"{text[:_LONGEST_CHARACTERS]}…"
    step = next_step or source.kind.remedy
    given = f"{source.option}={' '.join(shown.split())}" if source.kind.is_shown else source.option
    return OptionError(f"{given} cannot be followed: {first_line(reason)}. {step}")


def _check(source: GrammarSource) -> None:
    """Raise OptionError for a grammar that is too long or too deep to be compiled."""
    try:
        check_length(len(source.text))
        source.kind.check(source.text)
    except (ValueError, RecursionError) as error:
        raise refusal(source, str(error)) from error


def _compile(tokenizer: LLTokenizer, source: GrammarSource) -> LLMatcher:
    try:
        matcher = new_matcher(tokenizer, source)
        wrong = matcher.get_error()
    except BaseException as error:  # too deep, say; a panic in llguidance is no Exception
        if is_interrupt(error):
            raise
        wrong = str(error) or type(error).__name__
    if wrong:
        raise refusal(source, wrong)
    return matcher


def _key(source: GrammarSource) -> bytes:
    return hashlib.sha256(f"{source.option}\n{source.before}\n{source.text}".encode("utf-8", "surrogatepass")).digest()
