"""JSON schemas as generators of schemas write them, made ready for llguidance in one walk.

What only describes is left out. What has the same meaning in other words is said in these. What llguidance cannot
follow is left out too, so that more is valid, unless the schema is strict. `oneOf` is followed as `anyOf`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias
from urllib.parse import unquote

from outrider.system.guard import is_interrupt
from outrider.system.listed import ListedOnce
from outrider.tokens.grammar.limits import check_length, is_cheap

DEEPEST_LEVELS = 128  # levels; llguidance reads no schema that has more
# Keywords with schemas within, of those that llguidance 1.9 implements; from its `json/schema.rs`.
_WITH_ONE = {"items", "additionalItems", "additionalProperties"}
_WITH_SEVERAL = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
_WITH_NAMED = {"properties", "patternProperties", "$defs", "definitions"}
_OF_VALUES = {"$ref", "const", "enum", "format", "type", *_WITH_ONE, *_WITH_SEVERAL, *_WITH_NAMED}
_CONSTRAINING = {  # and not implemented
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    "uniqueItems",
}  # fmt: skip
_FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid",
}  # fmt: skip
_TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_LONGEST_NAME = 1_000  # characters, up to which a name's length is followed
_LARGE_BOUND = 10**15  # from which on llguidance may not take it
# Pydantic's pattern of a Decimal, in words of Rust's regex crate: a number with one digit at least.
_SAME_PATTERNS = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$"}

_REFERENCE = re.compile(r'"\$ref": ("#/(?:[^"\\]|\\.)*")')
_LOOK_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])")  # which it has not

_SAID = ListedOnce(logging.getLogger("outrider"), "Of the schema of %s, this is not followed: %s.")
_MOST_PLACES = 20  # of what is left out, that are named
_LONGEST_PLACE = 100  # characters of a place, of which the last are shown
_MOST_TRIED = 100  # patterns and bounds of a schema that llguidance is asked for; others are taken to be followed
_LONGEST_TRIED = 500  # characters of such a pattern
_MOST_PATTERNS = 4  # of one object, which are tried together

# llguidance knows the lengths of months, and neither leap years nor leap seconds. Beside what it asks of a format; no
# second is the 60th, as which minutes have one is not known in advance.
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = f"({_LEAP_YEAR}-02-29|[0-9]{{4}}-(02-([01][0-9]|2[0-8])|(0[13-9]|1[0-2])-[0-9]{{2}}))"
_PATTERNS = {"date": f"^{_DATE}", "time": "^.{6}[0-5]", "date-time": f"^{_DATE}.{{7}}[0-5]"}

Change: TypeAlias = Callable[[dict[str, Any], str], Any]


def with_real_dates(schema: Any) -> Any:
    """A JSON schema whose dates and times are also bound by patterns. Other values are left as they are."""
    return _walked(schema, _with_date)


def _with_date(schema: dict[str, Any], _: str) -> dict[str, Any]:
    name, others = schema.get("format"), schema.get("allOf", [])
    if isinstance(name, str) and name in _PATTERNS and isinstance(others, list):
        schema["allOf"] = [*others, {"pattern": _PATTERNS[name]}]
    return schema


def widened(schema: Any, *, strict: bool = False) -> tuple[Any, list[str]]:
    """A JSON schema that llguidance can follow as far as this is known, and the first places of what it leaves out.

    strict: leave out only what says nothing about values. A schema without anything to change comes back equal.

    Raises:
        ValueError: for one that is too long, and for a strict one of which something cannot be followed, with the
            place.
    """
    text = json.dumps(schema, default=dict)
    check_length(len(text))
    widening = _Widening(schema)
    made = _walked(schema, widening.change, others=_tables_of(text))
    if strict and widening.left_out:
        raise ValueError(
            f"{widening.left_out[0]} cannot be followed, and the schema is strict. Leave it out, or set strict to false"
        )
    return made, widening.left_out


def say_once(what: str, left_out: list[str]) -> None:
    """List in the log, once, what of a schema is not followed."""
    _SAID.add(left_out, what)


def _walked(schema: Any, change: Change, place: str = "", depth: int = 0, others: frozenset[str] = frozenset()) -> Any:
    """A schema in which all schemas are changed, from the innermost. others: keywords of it that are tables of some."""
    if not isinstance(schema, Mapping) or depth > DEEPEST_LEVELS:
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        at = _at(place, key)
        if (key in _WITH_NAMED and isinstance(value, Mapping)) or key in others:
            made[key] = _table(value, change, at, depth + 1, is_table=key in _WITH_NAMED)
        elif key in _WITH_SEVERAL and isinstance(value, list):
            made[key] = [_walked(each, change, _at(at, i), depth + 1) for i, each in enumerate(value)]
        else:
            made[key] = _walked(value, change, at, depth + 1) if key in _WITH_ONE else value
    return change(made, place)


def _table(value: Any, change: Change, place: str, depth: int, *, is_table: bool = False) -> Any:
    """A table of schemas, perhaps within other tables, such as OpenAPI's components; or a schema."""
    if depth > DEEPEST_LEVELS or not isinstance(value, Mapping) or not (is_table or _OF_VALUES.isdisjoint(value)):
        return _walked(value, change, place, depth)
    go_on = _walked if is_table else _table
    return {name: go_on(each, change, _at(place, name), depth + 1) for name, each in value.items()}


def _tables_of(text: str) -> frozenset[str]:
    """Keywords of a schema, which is given as JSON, that its references lead into, besides usual ones."""
    return frozenset(_names_in(json.loads(place))[0] for place in _REFERENCE.findall(text)) - _OF_VALUES


def _at(place: str, name: object) -> str:
    """A place within another."""
    return f"{place}/{str(name)[:_LONGEST_PLACE]}"[-_LONGEST_PLACE:]


def _names_in(place: str) -> list[str]:
    """The names on the way to what a reference within a schema names, such as "#/$defs/node" (RFC 6901)."""
    return [name.replace("~1", "/").replace("~0", "~") for name in unquote(place[2:]).split("/")]


class _Widening:
    """Changes the schemas within one. left_out: the first places of what is left out."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.left_out: list[str] = []
        self._num_tried = 0  # questions to llguidance

    def change(self, made: dict[str, Any], place: str) -> Any:
        """A schema, whose inner ones are changed."""
        for key in [key for key, value in made.items() if value is None and key != "const"]:
            del made[key]  # as serializers write what is not set
        if made.get("not") is True or made.get("not") == {}:
            return False  # zod's and TypeBox's never
        for key in [key for key in made if key in _CONSTRAINING]:
            self._replace(made, key, place)
        if isinstance(made.get("oneOf"), list) and "anyOf" not in made:
            made["anyOf"] = made.pop("oneOf")
        self._set_type(made, place)
        self._set_numbers(made, place)
        self._set_patterns(made, place)
        return _or_null(made) if made.get("nullable") is True else made

    def _leave_out(self, made: dict[str, Any], key: str, place: str) -> None:
        del made[key]
        if len(self.left_out) < _MOST_PLACES:
            self.left_out.append(_at(place, key))

    def _replace(self, made: dict[str, Any], key: str, place: str) -> None:
        """Say the same as a keyword that is not implemented in other words, or leave it out."""
        value = made[key]
        if (key == "uniqueItems" and value is False) or (key == "propertyNames" and value in _ANY_NAME):
            del made[key]
            return
        if key == "propertyNames" and not made.get("patternProperties") and not made.get("properties"):
            pattern = _pattern_of_names(self._resolved(value))
            if pattern is not None and self._is_followed("pattern", pattern):
                del made[key]
                made |= {"patternProperties": {pattern: made.get("additionalProperties", True)}}
                made["additionalProperties"] = False
                return
        self._leave_out(made, key, place)

    def _resolved(self, schema: Any) -> Any:
        """A schema, or what it refers to."""
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found = self._root
        for name in _names_in(reference):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def _set_type(self, made: dict[str, Any], place: str) -> None:
        """Leave out a type that JSON has not, such as TypeBox's "RegExp", and formats that only describe a value."""
        kinds = [made["type"]] if isinstance(made.get("type"), str) else made.get("type")
        if isinstance(kinds, list) and any(isinstance(each, str) and each not in _TYPES for each in kinds):
            self._leave_out(made, "type", place)
        if isinstance(made.get("format"), str) and made["format"] not in _FORMATS:
            del made["format"]

    def _set_numbers(self, made: dict[str, Any], place: str) -> None:
        """Whole counts, and bounds that llguidance takes: it has not those of all 64-bit integers and of float32."""
        for key in _COUNTS:
            if isinstance(value := made.get(key), float) and value.is_integer():
                made[key] = int(value)
        bounds = {key: made[key] for key in _BOUNDS if isinstance(made.get(key), int | float)}
        for key in [key for key, value in bounds.items() if abs(value) >= sys.float_info.max]:
            if (bounds[key] < 0) == ("inimum" in key):  # zod's of a double, which all are within
                del made[key], bounds[key]
        large = [key for key, value in bounds.items() if abs(value) > _LARGE_BOUND]
        if large and not self._is_taken({"type": made.get("type", "number"), **bounds}):
            for key in large:
                self._leave_out(made, key, place)
        table, required = made.get("properties"), made.get("required", [])
        if not isinstance(table, Mapping) or not isinstance(required, list):
            return
        if not table.keys() <= {each for each in required if isinstance(each, str)}:
            for key in ("minProperties", "maxProperties"):  # counted where all that are named are required
                if made.get(key):
                    self._leave_out(made, key, place)

    def _set_patterns(self, made: dict[str, Any], place: str) -> None:
        """Patterns that llguidance takes."""
        pattern, patterns = made.get("pattern"), made.get("patternProperties")
        if isinstance(pattern, str):
            made["pattern"] = pattern = _SAME_PATTERNS.get(pattern, pattern)
            if not self._is_followed("pattern", pattern):
                self._leave_out(made, "pattern", place)
        if isinstance(patterns, dict) and not self._is_followed("patternProperties", *patterns):
            made.pop("additionalProperties", None)
            self._leave_out(made, "patternProperties", place)

    def _is_followed(self, key: str, *patterns: str) -> bool:
        """Whether llguidance takes these patterns. Those that may take long to compile are not tried here."""
        if any(map(_LOOK_AROUND.search, patterns)):
            return False
        if not all(is_cheap(each, _LONGEST_TRIED, _LOOK_AROUND) for each in patterns) or len(patterns) > _MOST_PATTERNS:
            return True
        return self._is_taken({key: patterns[0] if key == "pattern" else {each: {} for each in patterns}})

    def _is_taken(self, schema: Mapping[str, Any]) -> bool:
        """Whether llguidance takes a small schema, unless it was asked too often."""
        self._num_tried += 1
        return self._num_tried > _MOST_TRIED or _is_valid(json.dumps(schema))


_ANY_NAME: tuple[Any, ...] = (True, {}, {"type": "string"})


def _pattern_of_names(rules: Any) -> str | None:
    """A pattern for names that follow a schema; None if one keyword alone does not say it."""
    if not isinstance(rules, Mapping) or rules.get("type", "string") != "string":
        return None
    said = rules.keys() - {"type", "title", "description"}
    names = [rules["const"]] if said == {"const"} else rules.get("enum") if said == {"enum"} else None
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return "^(" + "|".join(map(re.escape, names)) + ")$"
    if said and said <= {"minLength", "maxLength"}:
        lengths = [rules.get(key, 0) for key in ("minLength", "maxLength")]
        if all(isinstance(length, int) and 0 <= length <= _LONGEST_NAME for length in lengths):
            return f"^(?s:.{{{lengths[0]:d},{rules.get('maxLength', '')}}})$"
    return rules["pattern"] if said == {"pattern"} and isinstance(rules["pattern"], str) else None


def _or_null(made: dict[str, Any]) -> dict[str, Any]:
    """A schema that OpenAPI 3.0 calls nullable. Places within it stay where they are, as far as that goes."""
    kinds = [made["type"]] if isinstance(made.get("type"), str) else made.get("type")
    if isinstance(kinds, list) and made.keys().isdisjoint(("$ref", "allOf", "anyOf", "const", "enum")):
        made["type"] = kinds if "null" in kinds else [*kinds, "null"]
        return made
    tables: dict[str, Any] = {key: made.pop(key) for key in ("$defs", "definitions") if key in made}
    return {"anyOf": [made, {"type": "null"}], **tables}


@lru_cache(512)
def _is_valid(schema: str) -> bool:
    try:
        from llguidance import LLMatcher
    except ImportError:
        return True  # which is said when the grammar is compiled
    try:
        return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    except BaseException as error:  # a panic in llguidance is no Exception
        if is_interrupt(error):
            raise
        return False
