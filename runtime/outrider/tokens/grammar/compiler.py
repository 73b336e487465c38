"""Compiles grammars for a bundle's tokenizer."""

from __future__ import annotations

import functools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from outrider.errors import BundleError, OptionError, needs
from outrider.system.files import reading
from outrider.system.guard import is_interrupt
from outrider.tokens.grammar.dates import with_real_dates
from outrider.tokens.grammar.limits import check_lark, check_length, check_schema
from outrider.tokens.grammar.state import GrammarState, first_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from outrider.config import GenerationConfig

TOKENIZER_FILE = "tokenizer.json"
# How JSON is written, unless the schema's "x-guidance" says otherwise. With one way to write a value more tokens are
# forced, and a model that is unsure cannot write blanks without end.
JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_KEPT = 32  # compiled grammars
_NUM_THREADS = 2  # where event loops have grammars compiled
_STARTING = Lock()  # a thread whose stack has another size
_STACK = 64 << 20  # bytes, for as many levels as `outrider.tokens.grammar.limits` allows; a thread has 0.5 to 8 MB
_LONGEST = 80  # characters of a grammar in a message
_NEXT_STEPS = {
    "json_schema": "Leave out what is not implemented, or express it in another way.",
    "regex": "Give a regular expression in the syntax of Rust's regex crate.",
    "grammar": "Give a Lark grammar with a rule 'start'.",
    "tools": "Give each function's parameters as a JSON schema.",
}


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar as it was given.

    option: "json_schema", "regex" or "grammar"; "tools" for a Lark grammar that was made for them. text: a JSON schema
    as JSON, a regular expression, or a Lark grammar.
    """

    option: str
    text: str

    @classmethod
    def of(cls, config: GenerationConfig) -> Source | None:
        """The grammar that a request's options ask for."""
        schema = {"type": "object"} if config.json_schema is True else config.json_schema
        texts = {
            "json_schema": None if schema is None else json.dumps(schema),
            "regex": config.regex,
            "grammar": config.grammar,
        }
        return next((cls(option, text) for option, text in texts.items() if text is not None), None)


class _Entry:
    """A place for a compiled grammar. lock: taken to compile it, so that this is done once."""

    def __init__(self, _: Source) -> None:
        self.lock = Lock()
        self.base: LLMatcher | None = None


class Grammars:
    """Compiles the grammars of an engine's requests.

    folder: has the tokenizer as Hugging Face's tokenizer.json, which is read when the first grammar is compiled.
    vocab_size: the main model's. eos_token_ids: every token that ends an answer. From any thread.

    threads: where event loops have grammars compiled. A slow one takes seconds, in which the loop's own threads are
    for requests without a grammar, and with one that is compiled.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._path = folder / TOKENIZER_FILE
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        self._lock = Lock()
        self._tools: tuple[LLTokenizer, LLExecutor] | None = None
        self._entry = functools.lru_cache(_KEPT)(_Entry)
        self.threads = ThreadPoolExecutor(_NUM_THREADS, "outrider grammars")

    def close(self) -> None:
        """End the threads. Grammars that were not begun are not compiled."""
        self.threads.shutdown(wait=False, cancel_futures=True)

    def is_compiled(self, source: Source) -> bool:
        """Whether `new_state` has nothing to compile."""
        return self._entry(source).base is not None

    def new_state(self, source: Source) -> GrammarState:
        """The state of an answer that begins.

        Raises:
            OptionError: when llguidance is not installed, or does not take the grammar.
            BundleError: when the bundle's tokenizer cannot be used.
        """
        with self._lock:
            tokenizer, executor = self._tools = self._tools or self._load(source.option)
            entry = self._entry(source)
        with entry.lock:  # of this grammar alone: others do not wait while it is compiled
            if entry.base is None:
                entry.base = _compile(tokenizer, source)
            return GrammarState(entry.base, executor, self._vocab_size, self._eos_token_ids, source.option)

    def _load(self, option: str) -> tuple[LLTokenizer, LLExecutor]:
        with needs(f"{option} needs the package llguidance", "structured", OptionError):
            from llguidance import LLExecutor, LLTokenizer
        if not self._path.is_file():
            raise BundleError(
                f"{option} needs the tokenizer as {self._path}, and the bundle has no such file. Export it again from "
                f"a checkpoint that has a {TOKENIZER_FILE}."
            )
        with reading(str(self._path), "Export the bundle again.", BundleError):
            text = self._path.read_text(encoding="utf-8")
        try:
            tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=[*self._eos_token_ids])
        except ValueError as error:
            raise BundleError(
                f"{option} cannot be used with the tokenizer {self._path}: {first_line(str(error))}. Leave the option "
                "out."
            ) from error
        return tokenizer, LLExecutor()


def _compile(tokenizer: LLTokenizer, source: Source) -> LLMatcher:
    from llguidance import LLMatcher

    def compiled() -> LLMatcher:
        if option == "json_schema":
            schema = json.dumps(with_real_dates(json.loads(text)))
            made = LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
        else:
            made = LLMatcher.grammar_from_regex(text) if option == "regex" else LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(tokenizer, made, log_level=0)
        matcher.compute_bitmask()  # may take a second, for which all would wait in the engine's thread
        return matcher

    text, option = source.text, source.option
    try:
        check_length(text)
        if option == "json_schema":
            check_schema(json.loads(text))
        elif option == "grammar":  # one for tools was made here, of schemas that were checked
            check_lark(text)
        matcher = _on_large_stack(compiled)
        wrong = matcher.get_error()
    except BaseException as error:  # too deep, say; a panic in llguidance is no Exception
        if is_interrupt(error):
            raise
        wrong = str(error)
    if wrong:
        shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
        raise OptionError(
            f"{option}={' '.join(shown.split())} cannot be followed: {first_line(wrong)}. {_NEXT_STEPS[option]}"
        )
    return matcher


def _on_large_stack(make: Callable[[], T]) -> T:
    """Call a function in a thread of its own. Threads that others start at this moment get as large a stack, too."""
    with ThreadPoolExecutor(1) as pool:
        with _STARTING:
            before = threading.stack_size(_STACK)
            try:
                made = pool.submit(make)  # starts the thread
            finally:
                threading.stack_size(before)
        return made.result()
