"""What llguidance makes of a tokenizer and a grammar. The same in the engine's process and in the one for trials."""

from __future__ import annotations

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.tokens.grammar.kinds import JSON_STYLE
from outrider.tokens.grammar.limits import MAX_LEXER_STATES, STEP_LEXER_FUEL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llguidance import LLMatcher, LLTokenizer

    from outrider.tokens.grammar.kinds import GrammarSource

_STARTING = Lock()  # a thread whose stack has another size
STACK_BYTES = 64 << 20  # for thousands of levels, at up to 5 kB each; a thread has 0.5 to 8 MB

T = TypeVar("T")


def new_tokenizer(text: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Hugging Face's tokenizer.json for llguidance. Raises ValueError."""
    from llguidance import LLTokenizer

    return LLTokenizer(text, n_vocab=vocab_size, eos_token=[*eos_token_ids])


def new_matcher(
    tokenizer: LLTokenizer, source: GrammarSource, in_own_form: str = "", stack_bytes: int = STACK_BYTES
) -> LLMatcher:
    """Compile a grammar and compute its first mask. The matcher may be in an error; a panic is a BaseException.

    in_own_form: the grammar in llguidance's form, if that was made already.
    """
    from llguidance import LLMatcher, LLParserLimits

    def compiled() -> LLMatcher:
        made = in_own_form or source.kind.compile(source.text, tokenizer)
        if source.before:
            (answer,) = _grammars(made)
            parts = [{"name": "start", "lark_grammar": source.before}, {**answer, "name": "answer"}]
            made = json.dumps({"grammars": parts})
        if _has_special(tokenizer, source.text):
            made = json.dumps({"grammars": [_unforced(each) for each in _grammars(made)]})
        bounds = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, step_lexer_fuel=STEP_LEXER_FUEL)
        matcher = LLMatcher(tokenizer, made, log_level=0, limits=bounds)
        matcher.compute_bitmask()  # may take a second, for which all would wait in the engine's thread
        return matcher

    return on_large_stack(compiled, stack_bytes)


def _grammars(made: str) -> list[dict[str, Any]]:
    """The parts of a grammar in llguidance's form; a grammar in Lark's is one."""
    try:
        found: list[dict[str, Any]] = json.loads(made)["grammars"]
    except (ValueError, KeyError, TypeError):
        return [{"lark_grammar": made}]
    return found


def _has_special(tokenizer: LLTokenizer, text: str) -> bool:
    """Whether a grammar contains the text of a special token, as it is written or escaped."""
    texts = {text, text.replace("\\", "")}
    with contextlib.suppress(ValueError):  # a schema, whose characters may be escapes
        texts.add(json.dumps(json.loads(text), ensure_ascii=False))
    return any(tokenizer.is_special_token(token_id) for each in texts for token_id in tokenizer.tokenize_str(each))


def _unforced(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a grammar that forces no tokens.

    llguidance 1.9 makes tokens of forced text as the tokenizer does, with special tokens where it contains their text.
    It then allows the special token alone, and does not take it: the answer would repeat it without end.
    """
    if (schema := part.get("json_schema")) is not None:
        styled = {"x-guidance": JSON_STYLE, **schema} if isinstance(schema, dict) else schema
        lark = f"start: %json {json.dumps(styled)}"
    else:
        lark = part["lark_grammar"]
    return {**part, "json_schema": None, "lark_grammar": f'%llguidance {{"no_forcing": true}}\n{lark}'}


def on_large_stack(make: Callable[[], T], stack_bytes: int = STACK_BYTES) -> T:
    """Call a function in a thread of its own. Threads that others start at this moment get as large a stack, too."""
    with ThreadPoolExecutor(1) as pool:
        with _STARTING:
            before = threading.stack_size(stack_bytes)
            try:
                made = pool.submit(make)  # starts the thread
            finally:
                threading.stack_size(before)
        return made.result()
