"""How a call is written between the markers of a format: read from a text that grows, and as rules of a grammar."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, TypeAlias

from outrider.inputs.tools.arguments import end_of_value
from outrider.inputs.tools.markers import literal, marker_in_lark, tags_in_lark
from outrider.inputs.tools.shapes import ToolCall, calls_of, may_be_call, python_calls, without_halves
from outrider.tokens.grammar import JSON_STYLE, check_length, with_real_dates
from outrider.types import TextTokenizer


@dataclass(frozen=True, slots=True)
class CallText:
    """What a text that grows is, if it is a call, or may become one."""

    calls: tuple[ToolCall, ...] = ()  # of an open text, what has come of one that is certain
    size: int = 0  # characters that were read
    state: Literal["open", "arguments", "object", "whole"] = "open"  # arguments in JSON follow, alone or in an object


OPEN = CallText()
Schemas: TypeAlias = Mapping[str, Any]  # of the tools' arguments, by name
Rules: TypeAlias = tuple[list[str], list[str]]  # of a grammar, and the places of a schema that they do not follow


class GrammarParts:
    """Expressions of a grammar in Lark. Their JSON is limited in length: it may have a function's definitions often."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._num_characters = 0
        self.marker = partial(marker_in_lark, tokenizer=tokenizer)
        self.tags = partial(tags_in_lark, tokenizer=tokenizer)

    def json(self, schema: Any) -> str:
        """JSON by a schema. Raises ValueError for too much."""
        made = json_in_lark(schema)
        self._num_characters += len(made)
        check_length(self._num_characters)
        return made


def json_in_lark(schema: Any) -> str:
    """JSON by a schema."""
    made = with_real_dates(schema)
    return f"%json {json.dumps({'x-guidance': JSON_STYLE} | made if isinstance(made, dict) else made)}"


class CallBody(ABC):
    """What stands between a format's markers."""

    markers: tuple[str, ...] = ()  # what may be tokens of their own
    end = ""  # after the arguments, if these do not say where they end
    next_begin = ""  # what another call in the same block begins with, in formats without a separator

    @abstractmethod
    def read(self, text: str, opener: str, end: str, schemas: Schemas) -> CallText | None:
        """What the text after a marker is; None: no call. opener, end: of the format."""

    @abstractmethod
    def rules(self, rule: str, function: Mapping[str, Any], parts: GrammarParts) -> Rules:
        """Rules for a call of a function."""


class JsonBody(CallBody):
    """A JSON object with a name and arguments. key: of the arguments."""

    next_begin = "{"

    def __init__(self, key: str = "arguments") -> None:
        self.key = key

    def read(self, text: str, opener: str, end: str, schemas: Schemas) -> CallText | None:  # noqa: ARG002
        """Read an object. Its arguments grow if they follow the name."""
        if head := _head_in_json(opener).match(text):
            return CallText((ToolCall(without_halves(json.loads(head[1], strict=False)), ""),), head.end(), "object")
        return read_object(text)

    def rules(self, rule: str, function: Mapping[str, Any], parts: GrammarParts) -> Rules:
        """Rules for the object."""
        head = f'{{"name": {json.dumps(function["name"])}, {json.dumps(self.key)}: '
        return [f'{rule}: {literal(head)} arguments_{rule} "}}"', _arguments(rule, function, parts)], []


class NamedBody(CallBody):
    """A name, and arguments in JSON after a marker, which some models leave out.

    typed: what may stand before that marker. numbered: what stands between a name and the call's number.
    """

    def __init__(self, after: str, *, typed: str = "", numbered: str = "") -> None:
        self.after, self.typed, self._numbered = after, typed, numbered
        self.markers = (after, "[CALL_ID]")  # Mistral's

    def read(self, text: str, opener: str, end: str, schemas: Schemas) -> CallText | None:  # noqa: ARG002
        """Read a call up to its arguments."""
        whole, part = head_by_name("", self.after, "{", optional=True)
        if head := whole.match(text):
            name = head[1].partition(self._numbered)[0] if self._numbered else head[1]
            return CallText((ToolCall(name, ""),), head.end(), "arguments")
        return OPEN if part.fullmatch(text) else None

    def rules(self, rule: str, function: Mapping[str, Any], parts: GrammarParts) -> Rules:
        """Rules for name, marker and arguments."""
        typed = f"({parts.tags(self.typed)})?" if self.typed else ""
        head = f"{literal(function['name'])} {typed} {parts.marker(self.after)}"
        return [f"{rule}: {head} arguments_{rule}", _arguments(rule, function, parts)], []


def _arguments(rule: str, function: Mapping[str, Any], parts: GrammarParts) -> str:
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    return f"arguments_{rule}: {parts.json(function.get('parameters') or none)}"


def read_object(text: str, *, needs_arguments: bool = False) -> CallText | None:
    """A call in JSON, whatever the order of its keys, or several in a list, once all is there."""
    if text.strip() and not may_be_call(text):
        return None
    if (end := end_of_value(text)) is None:
        return OPEN
    calls = calls_of(text[:end], needs_arguments=needs_arguments)
    return CallText(calls, end, "whole") if calls else None


_PREFIX = "functions."  # of a name
_AFTER_NAME = re.compile(r"(?:\.(?:c(?:a(?:ll?)?)?)?)?\s*(?:[({]|\Z)")  # Llama 3.1 writes f.call(a=1)


def read_spelled(text: str, names: Iterable[str]) -> CallText | None:
    """A call of one of these functions as `f {"a": 1}`, `f(a=1)` or `[f(a=1)]`."""
    before, bracket, _ = text.partition("{")
    name = _unprefixed(before.strip())
    if bracket and name in names:
        return CallText((ToolCall(name, ""),), len(before), "arguments")
    head = _unprefixed(text.lstrip().removeprefix("[").lstrip())
    if not _PREFIX.startswith(head) and not any(
        name.startswith(head) or (head.startswith(name) and _AFTER_NAME.match(head[len(name) :])) for name in names
    ):
        return None
    if (end := end_of_value(text)) is None:
        return OPEN
    calls = python_calls(text[:end])
    return CallText(calls, end, "whole") if calls else None


def offered(name: str, names: Iterable[str]) -> str:
    """The function that a name means, where models put more around it; the name itself if there is none."""
    plain = _unprefixed(name.strip("\"' "))
    return plain if name not in names and plain in names else name


def _unprefixed(name: str) -> str:
    return name.removeprefix(_PREFIX).removesuffix(".call")


@lru_cache
def _head_in_json(opener: str) -> re.Pattern[str]:
    """Matches an object up to its arguments; group 1 is the name as JSON. opener: what may come before the object.

    The bracket may be doubled, as Qwen2.5-Coder's template shows it.
    """
    name = r'"(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
    first = rf'\s*(?:{re.escape(opener)})?\s*\{{{{1,2}}\s*"name"\s*:\s*({name})'
    return re.compile(rf'{first}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')


@lru_cache
def head_by_name(
    before: str, after: str, *ahead: str, optional: bool = False
) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns for a name between two texts, before one of those ahead: for all of it, and for any part.

    Group 1 is the name. Mistral's models may write "[CALL_ID]…" after it. optional: the text after may be missing.
    """
    name, call_id = r"[^\s<>\[\]{}]+", [*map(re.escape, "[CALL_ID]"), r"[^\[\]]*"]
    ends, mark = "|".join(map(re.escape, ahead)), "?" if optional else ""
    whole = rf"\s*{re.escape(before)}({name})(?:{''.join(call_id)})?\s*(?:{re.escape(after)}){mark}\s*(?={ends})"
    head, blank = [r"\s*", *map(re.escape, before), name], [r"\s*"]
    parts = [
        _part([*head, *middle, *blank, *map(re.escape, after), *blank, *map(re.escape, end)])
        for end in ahead
        for middle in ([], call_id)
    ]
    return re.compile(whole), re.compile("|".join(parts))


def _part(atoms: list[str]) -> str:
    """A pattern for any beginning of what these match one after the other."""
    part = ""
    for atom in reversed(atoms):
        part = f"(?:{atom}{part})?"
    return part
