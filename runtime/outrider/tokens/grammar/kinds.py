"""The kinds of grammars, a row each: how one is read, checked and compiled, and what helps where that fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.tokens.grammar.dates import with_real_dates
from outrider.tokens.grammar.gbnf import is_gbnf
from outrider.tokens.grammar.gbnf_lark import gbnf_to_lark
from outrider.tokens.grammar.limits import check_lark, check_schema, entries_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

# How JSON is written, unless the schema's "x-guidance" says otherwise. With one way to write a value more tokens are
# forced, and a model that is unsure cannot write blanks without end.
JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Bounds of a cheap grammar. Measured with 49,152 tokens: such grammars take at most some tens of milliseconds.
CHEAP_CHARACTERS = 20_000
_CHEAP_GBNF_CHARACTERS = 1_000  # whose translation may take longer
_CHEAP_PATTERN_CHARACTERS = 500
_CHEAP_COPIES = 20_000  # characters of patterns, with repetitions written out
_CHEAP_LENGTH = 1_000  # minLength, maxLength and similar
_CHEAP_MULTIPLE = 10_000  # all multipleOf together, without the decimal points: automata have a state for each rest
_CHEAP_PATTERNS = 8  # patterns and formats of a schema, which may be intersected through references

_COUNTED = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
_LENGTHS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_COMBINES = {"allOf", "patternProperties", "x-guidance"}  # intersections, and grammars within schemas
_OF_SCHEMAS = re.compile(
    r'"(?:allOf|pattern|patternProperties|format|multipleOf|x-guidance)"|"(?:min|max)[A-Z]\w+"\s*:\s*\d{4}'
)


@dataclass(frozen=True, slots=True)
class GrammarKind:
    """What a grammar is written in."""

    read: Callable[[Any], str]  # the value of a request's option as text
    check: Callable[[str], None]  # raises ValueError for a text that would be compiled too deep
    is_cheap: Callable[[str], bool]  # whether a text is certain to compile at once and in little memory
    compile: Callable[[str, LLTokenizer], str]  # in llguidance's form; raises ValueError
    remedy: str  # what to do where it cannot be followed
    is_shown: bool = True  # whether an error quotes the text; else it is not the user's own


def _is_cheap_pattern(text: str) -> bool:
    return len(text) <= _CHEAP_PATTERN_CHARACTERS and len(text) * _num_copies(text, nested=False) <= _CHEAP_COPIES


def _num_copies(text: str, nested: bool = True) -> int:
    """At most how often a part of a pattern is repeated. nested: every count may repeat all others."""
    copies, longest = 1, 1
    for found in _COUNTED.finditer(text):
        count = max(1, *(int(digits[:9]) for digits in (found[1], found[2], "0") if digits))
        if nested or text[found.start() - 1] in ")}":
            copies *= count
        else:
            longest = max(longest, count)
    return copies * longest


def _is_cheap_schema(text: str) -> bool:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return True  # refused without compiling it
    patterns, multiple = 0, 1
    for key, value in entries_of(schema):
        if key in _COMBINES:
            return False
        if key in _LENGTHS and isinstance(value, int | float) and value > _CHEAP_LENGTH:
            return False
        if key == "multipleOf":
            digits = str(value).replace(".", "")[:9]
            multiple *= max(1, int(digits)) if digits.isdecimal() else _CHEAP_MULTIPLE + 1
            if multiple > _CHEAP_MULTIPLE:
                return False
        if key in ("pattern", "format") and isinstance(value, str):
            patterns += 1
            if patterns > _CHEAP_PATTERNS or (key == "pattern" and not _is_cheap_pattern(value)):
                return False
    return True


def _read_schema(value: Any) -> str:
    return json.dumps({"type": "object"} if value is True else value)


def _compile_schema(text: str, _: LLTokenizer) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(with_real_dates(json.loads(text))), defaults=JSON_STYLE)


def _compile_regex(text: str, _: LLTokenizer) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(text)


def _compile_grammar(text: str, tokenizer: LLTokenizer) -> str:
    """GBNF, which llama.cpp's clients send, or Lark."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(gbnf_to_lark(text, tokenizer) if is_gbnf(text) else text)


def _is_cheap_grammar(text: str) -> bool:
    if is_gbnf(text):
        return len(text) <= _CHEAP_GBNF_CHARACTERS and _num_copies(text) <= _CHEAP_LENGTH
    return len(text) <= _CHEAP_COPIES // 10 and not set("&~%") & set(text) and _num_copies(text) <= _CHEAP_LENGTH


def _is_cheap_tools(text: str) -> bool:
    return not _OF_SCHEMAS.search(text) and _num_copies(text, nested=False) <= _CHEAP_LENGTH


def _unchecked(_: str) -> None:
    """Patterns have no depth that is not limited; grammars for tools were made of schemas that were checked."""


KINDS = {
    "json_schema": GrammarKind(
        _read_schema,
        lambda text: check_schema(json.loads(text)),
        _is_cheap_schema,
        _compile_schema,
        "Leave out what is not implemented, or express it in another way.",
    ),
    "regex": GrammarKind(
        str,
        _unchecked,
        _is_cheap_pattern,
        _compile_regex,
        "Give a regular expression in the syntax of Rust's regex crate.",
    ),
    "grammar": GrammarKind(
        str,
        lambda text: None if is_gbnf(text) else check_lark(text),  # GBNF is checked as it is read
        _is_cheap_grammar,
        _compile_grammar,
        "Give a Lark grammar with a rule 'start', or one in GBNF with a rule 'root'.",
    ),
    "tools": GrammarKind(
        str,
        _unchecked,
        _is_cheap_tools,
        _compile_grammar,
        "Give each function's parameters as a JSON schema.",
        is_shown=False,
    ),
}
