"""A grammar as it was given, and whether its cost is known without compiling it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from outrider.config import GenerationConfig

# Bounds of a cheap grammar. Measured with 49,152 tokens: such grammars take at most some tens of milliseconds.
_CHEAP_CHARACTERS = 20_000
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

_GBNF_RULE = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_MOST_GBNF_CHARACTERS = 20_000  # which take up to 0.2 seconds: reading them is quadratic in the number of rules
_LARK_HEADER = "%llguidance {}\n"  # which changes nothing


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as it was given.

    option: "json_schema", "regex" or "grammar"; "tools" for a Lark grammar that was made for them. text: a JSON schema
    as JSON, a regular expression, or a Lark grammar. before: a Lark rule for what comes before it, which refers to it
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
        schema = {"type": "object"} if config.json_schema is True else config.json_schema
        texts = {
            "json_schema": None if schema is None else json.dumps(schema),
            "regex": config.regex,
            "grammar": None if config.grammar is None else _lark_of(config.grammar),
        }
        return next((cls(option, text) for option, text in texts.items() if text is not None), None)

    @property
    def is_cheap(self) -> bool:
        """Whether it is certain, from its text alone, to compile at once and in little memory.

        Those are grammars of a usual size without intersections, nested counts or many patterns.
        """
        text = self.text
        if len(text) > _CHEAP_CHARACTERS:
            return False
        if self.option == "regex":
            return _is_cheap_pattern(text)
        if self.option == "json_schema":
            return _is_cheap_schema(text)
        if self.option == "tools":
            return not _OF_SCHEMAS.search(text) and _num_copies(text, nested=False) <= _CHEAP_LENGTH
        return len(text) <= _CHEAP_COPIES // 10 and not set("&~%") & set(text) and _num_copies(text) <= _CHEAP_LENGTH


@lru_cache(32)
def _lark_of(grammar: str) -> str:
    """A grammar of llama.cpp's, in GBNF, in Lark's form. Any other, or one that cannot be read, as it is."""
    if len(grammar) > _MOST_GBNF_CHARACTERS or not _GBNF_RULE.search(grammar):
        return grammar
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError:  # compiling it says what is missing
        return grammar
    try:
        return gbnf_to_lark(grammar).removeprefix(_LARK_HEADER).strip()
    except (Exception, RecursionError):  # its own errors, and others for odd texts
        return grammar


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
    for key, value in _entries(schema):
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


def _entries(schema: Any) -> Iterator[tuple[str, Any]]:
    """All keys with their values, at every level."""
    values = [schema]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            yield from value.items()
            values += value.values()
        elif isinstance(value, list):
            values += value
