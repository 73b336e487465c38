"""The grammars of an engine: compiled once for all requests, and kept."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock
from typing import TYPE_CHECKING

from outrider.errors import BundleError, EngineClosed, OptionError, needs
from outrider.system.children import POLL_SECONDS, ChildPool, ClientLeft
from outrider.system.files import reading
from outrider.tokens.grammar.child import Start
from outrider.tokens.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.tokens.grammar.limits import GrammarLimits
from outrider.tokens.grammar.matcher import new_tokenizer
from outrider.tokens.grammar.state import GrammarState, first_line

if TYPE_CHECKING:
    from pathlib import Path

    from llguidance import LLExecutor, LLTokenizer

    from outrider.tokens.grammar.kinds import GrammarSource

TOKENIZER_FILE = "tokenizer.json"
_KEPT_GRAMMARS = 32  # compiled grammars
_KEPT_BYTES = 512 << 20  # bytes of compiled grammars, as far as they were tried
_KEPT_REFUSALS = 256
_NUM_THREADS = 2  # where event loops have grammars compiled
_LEFT = "The grammar is not compiled: its client has left. Send the request again."


class _Entry:
    """A place for a compiled grammar. lock: taken to compile it, so that this is done once."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.compiled: CompiledGrammar | None = None


class Grammars:
    """The compiled grammars of an engine's requests, and those that were refused.

    folder: has the tokenizer as Hugging Face's tokenizer.json, which is read when the first grammar is compiled.
    vocab_size: the main model's. eos_token_ids: every token that ends an answer. limits: of a grammar. From any thread.

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
        start = Start(str(self._path.absolute()), vocab_size, eos_token_ids)
        self.trials = ChildPool("outrider.tokens.grammar.child", start)
        self._compiler = GrammarCompiler(self.trials, self.limits)
        self.threads = ThreadPoolExecutor(_NUM_THREADS, "outrider grammars")

    def close(self) -> None:
        """End the threads and processes. Grammars that were not begun are not compiled."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.trials.close()

    def is_quick(self, source: GrammarSource) -> bool:
        """Whether `new_state` returns at once: the grammar is compiled, refused, or certain to be cheap."""
        with self._lock:
            entry = self._entries.get(source)
            return (
                source.is_cheap or _key(source) in self._refused or (entry is not None and entry.compiled is not None)
            )

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
            if entry.compiled is None:
                compiled = self._compile(tokenizer, source, gone)
                with self._lock:
                    entry.compiled = compiled
                    self._evict()
            given = self._vocab_size, self._eos_token_ids, source.option
            return GrammarState(entry.compiled.base, executor, *given, limits=self.limits)
        finally:
            entry.lock.release()

    def _compile(self, tokenizer: LLTokenizer, source: GrammarSource, gone: Event | None) -> CompiledGrammar:
        """Compile a grammar, unless it was refused before. A refusal is kept."""
        with self._lock:
            if (known := self._refused.get(_key(source))) is not None:
                raise OptionError(known)
        try:
            return self._compiler.compile(tokenizer, source, gone)
        except ClientLeft as left:
            raise (EngineClosed() if self.trials.closed else OptionError(_LEFT)) from left
        except OptionError as error:
            with self._lock:
                self._refused[_key(source)] = str(error)
                if len(self._refused) > _KEPT_REFUSALS:
                    self._refused.popitem(last=False)
            raise

    def _evict(self) -> None:
        """Delete the oldest grammars beyond what is kept; not the newest."""
        while len(self._entries) > 1 and (len(self._entries) > _KEPT_GRAMMARS or self._memory > _KEPT_BYTES):
            self._entries.popitem(last=False)

    @property
    def _memory(self) -> int:
        return sum(each.compiled.memory for each in self._entries.values() if each.compiled)

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


def _key(source: GrammarSource) -> bytes:
    return hashlib.sha256(f"{source.option}\n{source.before}\n{source.text}".encode("utf-8", "surrogatepass")).digest()
