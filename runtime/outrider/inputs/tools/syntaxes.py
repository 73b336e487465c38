"""Calls in syntaxes of their own, Python's and Gemma's: how they are read, and grammars for them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.inputs.tools.bodies import OPEN, CallBody, CallText, GrammarParts, Rules, Schemas
from outrider.inputs.tools.markers import in_regex, literal
from outrider.inputs.tools.shapes import PYTHON_NAME, ReadWhole, calls_of, gemma_calls, python_calls
from outrider.inputs.tools.values import (
    ABOUT,
    OF_OBJECTS,
    OF_STRINGS,
    bounds_in_lark,
    branches,
    definitions_of,
    properties_of,
    values_of,
)

_KEY = "[A-Za-z_][A-Za-z0-9_]*"  # one that is written without quotes
_SCALARS = ("boolean", "integer", "null", "number")  # which Gemma writes as JSON
_WORDS = {True: '"True"', False: '"False"', None: '"None"'}  # of Python, for what JSON has, too


@dataclass(frozen=True)
class CallSyntax(CallBody):
    """How calls are written that are no JSON: f(a="x", b=[True]), or call:f{a:<|"|>x<|"|>,b:[true]}.

    A grammar has Python's arguments as JSON, in which True, False and None may stand for a whole value. Gemma's lists
    and objects may be any.
    """

    calls_in: ReadWhole  # the calls that a text is
    before: str  # the name
    opener: str  # around the arguments
    closer: str
    equals: str  # after an argument's name
    comma: str  # between arguments
    quote: str  # around strings
    is_python: bool = False  # values are JSON
    is_sorted: bool = False  # names are in order

    def read(self, text: str, opener: str, end: str, schemas: Schemas) -> CallText | None:  # noqa: ARG002
        """Read calls, once the format's marker after them is there."""
        written, marker, _ = text.partition(end)
        if not marker:
            return OPEN
        calls = self.calls_in(written) or calls_of(written)
        return CallText(calls, len(written), "whole") if calls else None

    @property
    def markers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The quote, if it is a tag."""
        return (self.quote,) if len(self.quote) > 1 else ()

    def rules(self, rule: str, function: Mapping[str, Any], parts: GrammarParts) -> Rules:
        """Rules for a call in this syntax."""
        schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
        made = _Rules(self, rule, schema, parts)
        made.left_out += [f"/{keyword}" for keyword in sorted(schema.keys() - OF_OBJECTS)]
        arguments = made.arguments()
        head = literal(f"{self.before}{function['name']}{self.opener}")
        return [f"{rule}: {head} {arguments} {literal(self.closer)}", *made.rules], made.left_out


class _Rules:
    """The rules for the arguments of one call."""

    def __init__(self, syntax: CallSyntax, rule: str, root: Mapping[str, Any], parts: GrammarParts) -> None:
        self.rules, self.left_out = list[str](), list[str]()
        self._syntax, self._rule, self._root, self._in_json = syntax, rule, root, parts.json
        self._quote = parts.marker(syntax.quote)
        self._named = dict[str, str]()  # rules by what they are for

    def arguments(self) -> str:
        """Names and values, those that are required and others, in the schema's order."""
        (properties, required), comma = properties_of(self._root), literal(self._syntax.comma)
        if not properties:
            if self._root.get("additionalProperties", True) is False:
                return ""
            pair = self._new(f"/{_KEY}/ {literal(self._syntax.equals)} {self._value({}, '/additionalProperties')}")
            return f"({pair} ({comma} {pair})*)?"
        ordered = sorted(properties, key=str.lower) if self._syntax.is_sorted else list(properties)
        if self._syntax.is_python:
            self.left_out += [f"/properties/{key[:100]}" for key in ordered if not PYTHON_NAME.fullmatch(key)]
            ordered = [key for key in ordered if PYTHON_NAME.fullmatch(key)]
        firsts, is_open, rest = list[str](), True, ""  # whether another argument may be the first
        for key in reversed(ordered):
            value = self._value(properties[key], f"/properties/{key[:100]}")
            is_plain = self._syntax.is_python or re.fullmatch(_KEY, key)
            shown = literal(key) if is_plain else self._quoted(key)
            name = self._new(f"{shown} {literal(self._syntax.equals)} {value}")
            if key in required:
                firsts, is_open = [], False
            firsts.append(f"{name} {rest}")
            rest = self._new(f"{comma} {name} {rest}" if key in required else f"({comma} {name})? {rest}")
        return f"({' | '.join(reversed(firsts))})" + ("?" if is_open else "")

    def _value(self, schema: Any, place: str) -> str:
        """An expression for a value."""
        found = branches(schema, self._root)
        if self._syntax.is_python:
            whole = {**definitions_of(self._root), **schema} if isinstance(schema, Mapping) else schema
            words = [word for branch in found for value, word in _WORDS.items() if _allows(branch, value)]
            return f"({' | '.join([self._in_json(whole), *dict.fromkeys(words)])})"
        return f"({' | '.join(dict.fromkeys(each for branch in found for each in self._in_gemma(branch, place)))})"

    def _in_gemma(self, branch: Mapping[str, Any], place: str) -> list[str]:
        """Expressions for the values of a schema with one type at most."""
        values, kind, said = values_of(branch), branch.get("type"), branch.keys() - ABOUT
        if values is not None and not any(isinstance(value, list | Mapping) for value in values):
            return [
                f"{self._quote} {literal(value)} {self._quote}"
                if isinstance(value, str)
                else literal(json.dumps(value))
                for value in values
            ]
        if kind in _SCALARS:
            return [self._in_json(branch)]
        if said - (OF_STRINGS if kind == "string" else {"type"}):
            self.left_out.append(place)
        return [self._text(bounds_in_lark(branch, "Length")) if kind == "string" else self._any(kind)]

    def _quoted(self, text: str) -> str:
        return f"{self._quote} {literal(text)} {self._quote}"

    def _text(self, bounds: str = "0,") -> str:
        text, quote = f"/(?s:.{{{bounds}}})/", self._syntax.quote
        if self._quote == literal(quote):
            return f"{self._quote} {self._new(text, suffix=self._quote)}"
        name = self._new(f"{text} & ~/(?s:.*){in_regex(quote)}(?s:.*)/").upper()
        self.rules[-1] = name + self.rules[-1][len(name) :]
        return f"{self._quote} {name} {self._quote}"

    def _any(self, kind: object) -> str:
        """Any value of a type; of any type if that is none of these."""
        if not self._named:
            text, scalar = self._text(), self._in_json({"type": [*_SCALARS]})
            any_, pair = f"{self._rule}_any", f"{self._rule}_pair"
            self._named["array"] = self._new(f'"[" ({any_} ("," {any_})*)? "]"')
            self._named["object"] = self._new(f'"{{" ({pair} ("," {pair})*)? "}}"')
            self.rules += [f"{any_}: {text} | {scalar} | {' | '.join(self._named.values())}"]
            self.rules += [f'{pair}: (/{_KEY}/ | {text}) ":" {any_}']
        return self._named.get(str(kind), f"{self._rule}_any")

    def _new(self, expression: str, suffix: str = "") -> str:
        name = f"{self._rule}_r{len(self.rules)}"
        self.rules.append(f"{name}{f'[suffix={suffix}]' if suffix else ''}: {expression}")
        return name


def _allows(branch: Mapping[str, Any], value: bool | None) -> bool:
    """Whether a schema allows true, false or null."""
    values = values_of(branch)
    if values is not None:
        return any(each is value for each in values)
    return branch.get("type", "") in ("", "null" if value is None else "boolean") and not branch.keys() - ABOUT - {
        "type"
    }


IN_PYTHON = CallSyntax(python_calls, "", "(", ")", "=", ", ", '"', is_python=True)
IN_GEMMA = CallSyntax(gemma_calls, "call:", "{", "}", ":", ",", '<|"|>', is_sorted=True)
