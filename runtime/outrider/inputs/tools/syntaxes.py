"""Calls in syntaxes of their own, Python's and Gemma's: how they are read, and grammars for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.inputs.tools.markers import in_regex, literal, marker_in_lark
from outrider.inputs.tools.shapes import PYTHON_NAME, ReadWhole, gemma_calls, python_calls
from outrider.inputs.tools.values import ABOUT, bounds_in_lark, definitions_of, properties_of, resolved, values_of
from outrider.types import TextTokenizer

_OF_NUMBERS = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KINDS = ("array", "boolean", "integer", "null", "number", "object", "string")
# Keywords that are followed, each for its type; those of numbers by llguidance.
_FOLLOWED = {
    *_OF_NUMBERS, "additionalProperties", "items", "maxItems", "maxLength", "minItems", "minLength", "properties",
    "required", "$defs", "$schema", "definitions",
}  # fmt: skip
_MOST_REFERENCES = 8  # one after another
_KEY = r"[A-Za-z_][A-Za-z0-9_]*"  # one that is written without quotes


@dataclass(frozen=True)
class CallSyntax:
    """How calls are written that are no JSON: f(a="x", b=[True]), or call:f{a:<|"|>x<|"|>,b:[true]}."""

    read: ReadWhole  # the calls that a text is
    before: str  # the name
    opener: str  # around the arguments
    closer: str
    equals: str  # after an argument's name
    comma: str  # between values
    colon: str  # after a key
    words: tuple[str, str, str]  # for true, false and null
    quote: str  # around strings
    is_python: bool = False  # strings have Python's escapes, keys have quotes, and JSON is read, too
    is_sorted: bool = False  # names are in order

    def rules(
        self, rule: str, function: Mapping[str, Any], tokenizer: TextTokenizer, in_json: Callable[[Any], str]
    ) -> tuple[list[str], list[str]]:
        """A grammar's rules for a call of a function, and the places of its schema that they do not follow.

        in_json: the rule for JSON by a schema.
        """
        made = _Rules(self, rule, function.get("parameters") or {}, tokenizer, in_json)
        schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
        arguments = made.of_object(schema, "", self.equals, quoted=False)
        head = literal(f"{self.before}{function['name']}{self.opener}")
        return [f"{rule}: {head} {arguments} {literal(self.closer)}", *made.rules], made.left_out


def _at(place: str, name: str) -> str:
    """A place within another, as far as errors and the log show it."""
    return f"{place}/{name[:100]}"[:200]


class _Rules:
    """The rules for the values of one call."""

    def __init__(
        self,
        syntax: CallSyntax,
        rule: str,
        root: Mapping[str, Any],
        tokenizer: TextTokenizer,
        in_json: Callable[[Any], str],
    ) -> None:
        self.rules, self.left_out = list[str](), list[str]()
        self._syntax, self._rule, self._root, self._in_json = syntax, rule, root, in_json
        self._quote = marker_in_lark(syntax.quote, tokenizer)
        self._names = dict[str, str]()  # of the rules for what schemas refer to, for strings and for any value
        self._definitions = definitions_of(root)

    def of_object(self, schema: Mapping[str, Any], place: str, colon: str, *, quoted: bool) -> str:
        """Keys and values, those that are required and others, in the schema's order. quoted: whether keys are."""
        (properties, required), more = properties_of(schema), schema.get("additionalProperties", True)
        if not properties:
            return "" if more is False else self._of_map(more, place, colon, quoted=quoted)
        comma, rest = literal(self._syntax.comma), ""
        firsts, is_open = list[str](), True  # whether another property may be the first
        ordered = sorted(properties, key=str.lower) if self._syntax.is_sorted else list(properties)
        if self._syntax.is_python and not quoted:
            self.left_out += [_at(place, f"properties/{key}") for key in ordered if not PYTHON_NAME.fullmatch(key)]
            ordered = [key for key in ordered if PYTHON_NAME.fullmatch(key)]
        for key in reversed(ordered):
            value = self.of(properties[key], _at(place, f"properties/{key}"))
            name = self._new(f"{self._of_key(key, quoted=quoted)} {literal(colon)} {value}")
            if key in required:
                firsts, is_open = [], False
            firsts.append(f"{name} {rest}")
            rest = self._new(f"{comma} {name} {rest}" if key in required else f"({comma} {name})? {rest}")
        return f"({' | '.join(reversed(firsts))})" + ("?" if is_open else "")

    def of(self, schema: Any, place: str) -> str:
        """An expression for a value."""
        if not isinstance(schema, Mapping) or not schema.keys() - ABOUT:
            return self._of_any()
        if isinstance(reference := schema.get("$ref"), str):
            found = schema
            for _ in range(_MOST_REFERENCES):
                found = resolved(found, self._root)
            is_endless = isinstance(found, Mapping) and "$ref" in found
            return self._named(reference, lambda: self._of_any() if is_endless else self.of(found, reference))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return f"({' | '.join(self.of(each, _at(place, f'{key}/{i}')) for i, each in enumerate(schema[key]))})"
        if (values := values_of(schema)) is not None:
            return f"({' | '.join(map(self._written, values))})"
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return f"({' | '.join(self.of({**schema, 'type': kind}, place) for kind in kinds)})"
        if not isinstance(kinds, str) or kinds not in _KINDS:
            return self._of_others(schema, place, self._of_any)
        return self._of_kind(kinds, schema, place)

    def _of_kind(self, kind: str, schema: Mapping[str, Any], place: str) -> str:
        """A value of one type."""
        make = {
            "string": lambda: self._of_string(bounds_in_lark(schema, "Length")),
            "array": lambda: self._of_array(schema, place),
            "object": lambda: (
                f'"{{" {self.of_object(schema, place, self._syntax.colon, quoted=self._syntax.is_python)} "}}"'
            ),
            "boolean": lambda: f"({literal(self._syntax.words[0])} | {literal(self._syntax.words[1])})",
            "null": lambda: literal(self._syntax.words[2]),
        }
        numbers = {key: schema[key] for key in _OF_NUMBERS if key in schema}
        if schema.keys() - ABOUT - _FOLLOWED:
            return self._of_others(schema, place, make.get(kind, lambda: self._in_json(numbers)))
        return make[kind]() if kind in make else self._in_json(numbers)

    def _of_others(self, schema: Mapping[str, Any], place: str, wider: Callable[[], str]) -> str:
        """A value whose schema has more than is known here: as JSON where that is read, else a wider one."""
        if self._syntax.is_python:
            return self._in_json({**self._definitions, **schema})
        self.left_out.append(place or "/")
        return wider()

    def _of_string(self, bounds: str = "0,") -> str:
        def make() -> str:
            if self._syntax.is_python:
                return rf'/"(?:[^"\\\x00-\x1f]|\\["\\nrt]){{{bounds}}}"/'
            text, quote = f"/(?s:.{{{bounds}}})/", self._syntax.quote
            if self._quote == literal(quote):
                name = f"{self._rule}_text_{len(self.rules)}"
                self.rules.append(f"{name}[suffix={self._quote}]: {text}")
                return f"{self._quote} {name}"
            name = f"{self._rule}_TEXT_{len(self.rules)}".upper()
            self.rules.append(f"{name}: {text} & ~/(?s:.*){in_regex(quote)}(?s:.*)/")
            return f"{self._quote} {name} {self._quote}"

        return self._named(f"string {bounds}", make)

    def _of_array(self, schema: Mapping[str, Any], place: str) -> str:
        least, _, most = bounds_in_lark(schema, "Items").partition(",")
        if most == "0":
            return literal("[]")
        item = self._new(self.of(schema.get("items", {}), _at(place, "items")))
        more = f"{{{max(int(least) - 1, 0)},{most and int(most) - 1}}}"
        return f'"[" ({item} ({literal(self._syntax.comma)} {item}){more}){"" if int(least) else "?"} "]"'

    def _of_map(self, schema: Any, place: str, colon: str, *, quoted: bool) -> str:
        """Any keys, with values by a schema."""
        key = self._of_string() if quoted else f"/{_KEY}/"
        pair = self._new(f"{key} {literal(colon)} {self.of(schema, _at(place, 'additionalProperties'))}")
        return f"({pair} ({literal(self._syntax.comma)} {pair})*)?"

    def _of_any(self) -> str:
        kinds = ("string", "number", "boolean", "null", "array", "object")
        return self._named("any", lambda: f"({' | '.join(self.of({'type': kind}, '') for kind in kinds)})")

    def _of_key(self, key: str, *, quoted: bool) -> str:
        is_plain = self._syntax.is_python or re.fullmatch(_KEY, key)  # Python's arguments never have quotes
        return literal(key) if not quoted and is_plain else self._written(key)

    def _written(self, value: Any) -> str:
        """A value as a literal of the grammar."""
        syntax = self._syntax
        if isinstance(value, str):
            text = json.dumps(value, ensure_ascii=False) if syntax.is_python else value
            return literal(text) if syntax.is_python else f"{self._quote} {literal(text)} {self._quote}"
        if value is None or isinstance(value, bool):
            return literal(syntax.words[2 if value is None else 0 if value else 1])
        comma = f" {literal(syntax.comma)} "
        if isinstance(value, list):
            return f'"[" {comma.join(map(self._written, value))} "]"'
        if isinstance(value, Mapping):
            pairs = (
                f"{self._of_key(key, quoted=syntax.is_python)} {literal(syntax.colon)} {self._written(each)}"
                for key, each in value.items()
            )
            return f'"{{" {comma.join(pairs)} "}}"'
        return literal(json.dumps(value))

    def _named(self, what: str, make: Callable[[], str]) -> str:
        """The rule for what is made once, and may refer to itself."""
        if what not in self._names:
            self._names[what] = f"{self._rule}_n{len(self._names)}"
            self.rules.append(f"{self._names[what]}: {make()}")
        return self._names[what]

    def _new(self, expression: str) -> str:
        name = f"{self._rule}_r{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name


IN_PYTHON = CallSyntax(
    python_calls, "", "(", ")", "=", ", ", ": ", ("True", "False", "None"), '"', is_python=True
)  # fmt: skip
IN_GEMMA = CallSyntax(
    gemma_calls, "call:", "{", "}", ":", ",", ":", ("true", "false", "null"), '<|"|>', is_sorted=True
)  # fmt: skip
