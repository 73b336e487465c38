"""The kinds of grammars, a row each: how one is read and compiled, and what helps where that fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.config import GRAMMAR_OPTIONS, GenerationConfig
from outrider.tokens.grammar.gbnf import is_gbnf
from outrider.tokens.grammar.gbnf_lark import gbnf_to_lark
from outrider.tokens.grammar.limits import is_cheap
from outrider.tokens.grammar.schemas import with_real_dates

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

# How JSON is written, unless the schema's "x-guidance" says otherwise. With one way to write a value more tokens are
# forced, and a model that is unsure cannot write blanks without end.
JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class GrammarKind:
    """What a grammar is written in."""

    read: Callable[[Any], str]  # the value of a request's option as text
    cheap_characters: int  # of a text that may be cheap to compile
    dear: re.Pattern[str]  # matches in one that is not
    compile: Callable[[str, LLTokenizer], str]  # in llguidance's form; raises ValueError
    remedy: str  # what to do where it cannot be followed
    is_shown: bool = True  # whether an error quotes the text; else it is not the user's own


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


# Patterns, also those of formats; what is intersected; large lengths; numbers that have a state for each rest.
_DEAR_SCHEMA = re.compile(
    r'"(?:allOf|format|multipleOf|pattern|patternProperties|x-guidance)"|"(?:min|max)[A-Z]\w+"\s*:\s*(?:\d{4}|[\d.]+[eE])'
)
_VERBOSE = r"\(\?[a-zA-Z-]*x"  # the flag of a regular expression by which a count may have blanks between its digits
KINDS = {
    "json_schema": GrammarKind(
        lambda value: json.dumps({"type": "object"} if value is True else value),
        20_000,
        _DEAR_SCHEMA,
        _compile_schema,
        "Leave out what is not implemented, or express it in another way.",
    ),
    "regex": GrammarKind(
        str,
        500,
        re.compile(_VERBOSE),
        _compile_regex,
        "Give a regular expression in the syntax of Rust's regex crate.",
    ),
    "grammar": GrammarKind(
        str,
        1_000,
        re.compile(f"[&~%]|/[a-z]*x|{_VERBOSE}"),
        _compile_grammar,
        "Give a Lark grammar with a rule 'start', or one in GBNF with a rule 'root'.",
    ),
    "tools": GrammarKind(
        str,
        20_000,
        _DEAR_SCHEMA,
        _compile_grammar,
        "Give each function's parameters as a JSON schema.",
        is_shown=False,
    ),
}


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as it was given.

    option: of `KINDS`, "tools" for a Lark grammar that was made for them. text: a JSON schema as JSON, a regular
    expression, or a grammar in Lark or GBNF. before: a Lark rule for what comes before it, which refers to it
    as @answer; empty if nothing does. parts: of one for tools, the JSON schema of each function's arguments by its
    name, to say which one is wrong.
    """

    option: str
    text: str
    before: str = ""
    parts: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, config: GenerationConfig) -> GrammarSource | None:
        """The grammar that a request's options ask for."""
        values = ((option, getattr(config, option)) for option in GRAMMAR_OPTIONS)
        return next((cls(option, KINDS[option].read(value)) for option, value in values if value is not None), None)

    @property
    def kind(self) -> GrammarKind:
        """How it is compiled."""
        return KINDS[self.option]

    @property
    def is_cheap(self) -> bool:
        """Whether it is certain, from its text alone, to compile at once and in little memory."""
        return is_cheap(self.text, self.kind.cheap_characters, self.kind.dear)
