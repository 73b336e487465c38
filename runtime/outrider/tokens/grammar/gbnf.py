"""Reads grammars in GBNF, llama.cpp's notation: rules over characters and tokens, without a lexer.

Source: llama.cpp, grammars/README.md and the parser in src/llama-grammar.cpp. Unlike there, a rule may begin with
itself, and counts above 2,000 are kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

_LAST_CHARACTER = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)  # which no text in UTF-8 has
_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_HEX = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}")
_PLAIN_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"} | {each: each for each in '\\"[]-'}
_TOKEN = re.compile(r"(!?)(<(?:\[([0-9]{1,9})\]>|[^>\r\n]+>))")
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_BRACES = re.compile(r"\{\s*([0-9]{1,9})\s*(,?)\s*([0-9]{0,9})\s*\}")


@dataclass(frozen=True, eq=False)
class Characters:
    """One character. ranges: first and last code points, sorted and disjoint; without surrogates."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class OneToken:
    """One token, or any but this one. name: its text with angle brackets; "" where `token_id` is given."""

    name: str
    token_id: int
    negated: bool


@dataclass(frozen=True, eq=False)
class Sequence:
    """Parts, one after the other. Of none: the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class OneOf:
    """One of several parts."""

    items: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    """A part, `least` to `most` times; None: without end."""

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True, eq=False)
class NamedRule:
    """What a rule of this name describes."""

    name: str


Node = Characters | OneToken | Sequence | OneOf | Repeat | NamedRule


def is_gbnf(text: str) -> bool:
    """Whether a grammar has a rule of GBNF. Lark's have none: they are written with one colon."""
    return _RULE.search(text) is not None


def read_gbnf(text: str) -> dict[str, Node]:
    """The rules of a grammar by their names, of which the last one of a name counts.

    Raises:
        ValueError: for a grammar that cannot be read, with its line.
    """
    reader = _Reader(text)
    try:
        rules = reader.rules()
    except ValueError as error:
        raise ValueError(f"line {text.count(chr(10), 0, reader.at) + 1}: {error}") from error
    if missing := next((name for name in reader.named if name not in rules), None):
        raise ValueError(f"there is no rule {missing!r}")
    if "root" not in rules:
        raise ValueError("there is no rule 'root', with which the text begins")
    return rules


class _Reader:
    """Reads a grammar from its first character on. at: the place of the next one."""

    def __init__(self, text: str) -> None:
        self._text, self.at = text, 0
        self.named: dict[str, None] = {}  # rules that others refer to

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self._take(_BLANK_LINES)
        while self.at < len(self._text):
            name = self._take(_NAME) or self._fail("a rule's name")
            self._take(_BLANK)
            if not self._text.startswith("::=", self.at):
                self._fail("'::='")
            self.at += 3
            self._take(_BLANK_LINES)
            found[name] = self._choice(_BLANK)
            if self.at < len(self._text) and self._text[self.at] not in "\r\n":
                self._fail("the end of the line")
            self._take(_BLANK_LINES)
        return found

    def _choice(self, blank: re.Pattern[str]) -> Node:
        """Alternatives. blank: what may stand between symbols; line ends do in parentheses."""
        items = [self._sequence(blank)]
        while self._text.startswith("|", self.at):
            self.at += 1
            self._take(_BLANK_LINES)
            items.append(self._sequence(blank))
        return items[0] if len(items) == 1 else OneOf(tuple(items))

    def _sequence(self, blank: re.Pattern[str]) -> Node:
        items: list[Node] = []
        while self.at < len(self._text) and self._text[self.at] not in "|)\r\n":
            mark = self._text[self.at]
            if mark in "*+?{":
                if not items:
                    self._fail("something to repeat")
                items[-1] = self._repeat(items[-1], mark)
            else:
                items.append(self._symbol(mark))
            self._take(blank)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _symbol(self, mark: str) -> Node:
        if mark == '"':
            self.at += 1
            return self._literal()
        if mark == "[":
            self.at += 1
            return self._class()
        if mark == ".":
            self.at += 1
            return Characters(disjoint([(0, _LAST_CHARACTER)]))
        if mark == "(":
            return self._group()
        if mark in "<!" and (token := _TOKEN.match(self._text, self.at)):
            self.at = token.end()
            return OneToken("" if token[3] else token[2], int(token[3] or 0), bool(token[1]))
        name = self._take(_NAME) or self._fail("a symbol")
        self.named[name] = None
        return NamedRule(name)

    def _group(self) -> Node:
        self.at += 1
        self._take(_BLANK_LINES)
        found = self._choice(_BLANK_LINES)
        if not self._text.startswith(")", self.at):
            self._fail("')'")
        self.at += 1
        return found

    def _repeat(self, item: Node, mark: str) -> Node:
        if mark == "{":
            braces = _BRACES.match(self._text, self.at) or self._fail("a count such as {2,4}")
            self.at = braces.end()
            least = int(braces[1])
            most = int(braces[3]) if braces[3] else None if braces[2] else least
            if most is not None and most < least:
                raise ValueError(f"{braces[0]} has a most below its least")
        else:
            self.at += 1
            least, most = _COUNTS[mark]
        return Sequence(()) if most == 0 else Repeat(item, least, most)

    def _literal(self) -> Node:
        items = list[Node]()
        while not self._text.startswith('"', self.at):
            code = self._character()
            items.append(Characters(disjoint([(code, code)])))
        self.at += 1
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _class(self) -> Node:
        negated = self._text.startswith("^", self.at)
        self.at += negated
        ranges = list[tuple[int, int]]()
        while not self._text.startswith("]", self.at):
            first = last = self._character()
            if self._text.startswith("-", self.at) and not self._text.startswith("-]", self.at):
                self.at += 1
                last = self._character()
            ranges.append((first, last))
        self.at += 1
        found = disjoint(_others(disjoint(ranges)) if negated else ranges)
        if not found or not ranges:
            raise ValueError("a class in [] has no character")
        return Characters(found)

    def _character(self) -> int:
        """The code point of a character, also of one that is written as an escape."""
        if self.at >= len(self._text):
            self._fail("the end of a text or class")
        character = self._text[self.at]
        self.at += 1
        if character != "\\":
            return ord(character)
        mark = self._text[self.at : self.at + 1]
        if mark in _PLAIN_ESCAPES:
            self.at += 1
            return ord(_PLAIN_ESCAPES[mark])
        return int((self._take(_HEX) or self._fail(r"one of the escapes \t \r \n \\ \" \[ \] \- \x \u \U"))[1:], 16)

    def _take(self, pattern: re.Pattern[str]) -> str:
        """What of the text follows a pattern here; "" for nothing."""
        found = pattern.match(self._text, self.at)
        self.at = found.end() if found else self.at
        return found[0] if found else ""

    def _fail(self, wanted: str) -> NoReturn:
        here = self._text[self.at : self.at + 12].split("\n")[0].strip()
        raise ValueError(f"{wanted} is expected before {here!r}" if here else f"{wanted} is missing")


def disjoint(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted ranges that do not touch, within Unicode and without surrogates."""
    found = list[tuple[int, int]]()
    parts = [
        part for first, last in ranges for part in ((first, min(last, _SURROGATES[0] - 1)),
                                                    (max(first, _SURROGATES[1] + 1), min(last, _LAST_CHARACTER)))
    ]  # fmt: skip
    for first, last in sorted(part for part in parts if part[0] <= part[1]):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def _others(ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """The characters that are in none of these disjoint ranges."""
    ends = [-1, *(last for _, last in ranges)]
    begins = [*(first for first, _ in ranges), _LAST_CHARACTER + 1]
    return [(last + 1, first - 1) for last, first in zip(ends, begins, strict=True)]
