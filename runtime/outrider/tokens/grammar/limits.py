"""Limits of a grammar: of its size, its time and its memory, and which grammars need no trial within these.

llguidance itself limits the steps of its lexer and the size of what it makes; neither bounds its time or its memory. It
compiles recursively, so that what leads too deep ends the process: that of the trial. A cheap grammar has no room for
so many levels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.tokens.grammar.gbnf import is_gbnf

# llguidance's own limits, half of which no usual schema reaches
MAX_LEXER_STATES = 100_000  # of one answer, of 0.1 to 2 kB each
STEP_LEXER_FUEL = 50_000  # of one mask
MOST_CHARACTERS = 500_000  # which take up to some seconds; tens of seconds more


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may take.

    compile_seconds: of processor time, to compile it and compute its first masks. compile_memory: bytes for that.
    mask_seconds: for one mask, which is the tokens that may follow: other answers wait for it. answer_seconds: for all
    masks of an answer.
    """

    compile_seconds: float = 10.0
    compile_memory: int = 128 << 20
    mask_seconds: float = 0.25
    answer_seconds: float = 30.0


def check_length(num_characters: int) -> None:
    """Raise ValueError for a grammar that is longer than `MOST_CHARACTERS`."""
    if num_characters > MOST_CHARACTERS:
        raise ValueError(f"it has {num_characters:,} characters, and {MOST_CHARACTERS:,} can be followed")


def entries_of(schema: object) -> Iterator[tuple[str, Any]]:
    """All keys of a schema with their values, at every level."""
    values: list[Any] = [schema]
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            yield from value.items()
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value


# Bounds of a cheap grammar. Measured with 49,152 tokens: such grammars take at most some tens of milliseconds.
CHEAP_CHARACTERS = 20_000
_CHEAP_GBNF_CHARACTERS = 1_000  # whose translation may take longer
_CHEAP_PATTERN_CHARACTERS = 500
_CHEAP_COPIES = 20_000  # characters of patterns, with repetitions written out
_CHEAP_LENGTH = 1_000  # minLength, maxLength and similar
_CHEAP_MULTIPLE = 10_000  # all multipleOf together, without the decimal points: automata have a state for each rest
_CHEAP_PATTERNS = 8  # patterns and formats of a schema, which may be intersected through references

_COUNTED = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
# Of schemas: intersections, grammars within them, and large lengths; their patterns, and what numbers are multiples of.
_DEAR = re.compile(r'"(?:allOf|patternProperties|x-guidance)"|"(?:min|max)[A-Z]\w+"\s*:\s*(?:\d{4}|[\d.]+[eE])')
_PATTERN = re.compile(r'"pattern"\s*:\s*"((?:[^"\\]|\\.)*)"')
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([\d.eE+-]+)')


def is_cheap_pattern(text: str) -> bool:
    """Whether a regular expression is certain to compile at once and in little memory."""
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


def is_cheap_schemas(text: str) -> bool:
    """Whether a JSON schema, or a grammar for tools with some, is certain to compile at once and in little memory."""
    patterns = _PATTERN.findall(text)
    digits = [each.replace(".", "")[:9] for each in _MULTIPLE.findall(text)]
    multiple = math.prod(max(1, int(each)) if each.isdecimal() else _CHEAP_MULTIPLE + 1 for each in digits)
    return (
        not _DEAR.search(text)
        and multiple <= _CHEAP_MULTIPLE
        and len(patterns) + text.count('"format"') <= _CHEAP_PATTERNS
        and all(map(is_cheap_pattern, patterns))
        and _num_copies(text, nested=False) <= _CHEAP_LENGTH
    )


def is_cheap_grammar(text: str) -> bool:
    """Whether a grammar in Lark or GBNF is certain to compile at once and in little memory."""
    if is_gbnf(text):
        return len(text) <= _CHEAP_GBNF_CHARACTERS and _num_copies(text) <= _CHEAP_LENGTH
    return len(text) <= _CHEAP_COPIES // 10 and not set("&~%") & set(text) and _num_copies(text) <= _CHEAP_LENGTH
