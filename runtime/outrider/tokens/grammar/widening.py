"""JSON schemas as generators of schemas write them, made ready for llguidance.

What only describes is left out. What has the same meaning in other words is said in these. What llguidance cannot
follow is left out too, so that more is valid, unless the schema is strict.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from outrider.system.guard import is_interrupt
from outrider.system.listed import ListedOnce
from outrider.tokens.grammar.dates import DEEPEST_LEVELS
from outrider.tokens.grammar.exclusive import MOST_VALUES, exclude_each_other, names_in, parts_of, target_of
from outrider.tokens.grammar.limits import check_length, entries_of
from outrider.tokens.grammar.source import GrammarSource

# What llguidance 1.9 follows, and what says nothing about a value. From its `json/schema.rs`.
_FOLLOWED = {
    "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum",
    "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength",
    "minProperties", "minimum", "multipleOf", "oneOf", "pattern", "patternProperties", "prefixItems", "properties",
    "required", "type", "x-guidance",
}  # fmt: skip
_TABLES = {"$defs", "definitions"}
_CONSTRAINING = {
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    "uniqueItems",
}  # fmt: skip
_KEPT = {"$schema", "$id", "$anchor", "title", "description"}  # of which llguidance reads or ignores each
_FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid",
}  # fmt: skip
_TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}
_NULLABLE = {"$ref", "allOf", "anyOf", "const", "enum", "oneOf", "type"}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MOST_PATTERNS = 4  # of one object, which are tried together
_MOST_NAMES = 16  # of a reference, that lead to a definition
_LONGEST_NAME = 1_000  # characters, up to which a name's length is followed
_LARGE_BOUND = 10**15  # of a bound, from which on llguidance may not take it
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_TIME = r"T(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?|\d+([.,]\d+)?S)"
_SAME_PATTERNS = {
    # Pydantic's of a Decimal: a number with one digit at least.
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
    # zod's of a duration: weeks, or one at least of what it is made of.
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)({_TIME})?|{_TIME})$"
    ),
}
# What Rust's regex crate has not, once classes and escapes that it has are left out.
_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\\k|\(\?>|[+*?}]\+")
_PLAIN = re.compile(r"\\[pP]\{[^}]*(?:\}|\Z)|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|\\[^1-9k]", re.DOTALL)

_SAID = ListedOnce(logging.getLogger("outrider"), "Of the schema of %s, this is not followed: %s.")
_MOST_PLACES = 20  # of what is left out, that are named
_LONGEST_PLACE = 100  # characters of a place, and of each name in it
_MOST_TRIED = 100  # patterns and bounds of a schema that llguidance is asked for; others are taken to be followed
_MOST_COMPARED = 1_000  # schemas within all oneOf of a schema; others are taken to have values in common


class _Names(dict[str, "_Names"]):
    """What a schema's references name, by the names on the way. is_schema: whether one ends here."""

    is_schema = False


_NOTHING = _Names()


@dataclass(frozen=True, slots=True)
class _Place:
    """A place within a schema. referred: what references name below it."""

    referred: _Names
    name: str = ""
    outer: _Place | None = None

    def at(self, name: object) -> _Place:
        """The place of this name, or number, within."""
        text = str(name)
        return _Place(self.referred.get(text, _NOTHING), text, self)

    def __str__(self) -> str:
        place, outer, length = [self.name[:_LONGEST_PLACE]], self.outer, len(self.name)
        while outer is not None and length < _LONGEST_PLACE:
            place.append(outer.name[:_LONGEST_PLACE])
            length += len(outer.name) + 1
            outer = outer.outer
        return ("" if outer is None else "…/") + "/".join(reversed(place))


@dataclass(slots=True)
class _Found:
    """The whole schema, and what was found in it so far."""

    root: Any
    left_out: list[str] = field(default_factory=list)  # the first places of what is left out
    num_tried: int = 0  # questions to llguidance
    num_compared: int = 0  # schemas within oneOf

    def leave_out(self, place: _Place, comment: str = "") -> None:
        """Something is left out here."""
        if len(self.left_out) < _MOST_PLACES:
            self.left_out.append(f"{place}{comment}")


def widened(schema: Any, *, strict: bool = False) -> tuple[Any, list[str]]:
    """A JSON schema that llguidance can follow as far as this is known, and the first places of what it leaves out.

    strict: leave out only what says nothing about values. A schema without anything to change comes back equal.

    Raises:
        ValueError: for one that is too long, and for a strict one of which something cannot be followed, with the
            place.
    """
    check_length(len(json.dumps(schema, default=dict)))
    found = _Found(schema)
    made = _schema(schema, _Place(_referred(schema)), found, 0)
    if strict and found.left_out:
        raise ValueError(
            f"{found.left_out[0]} cannot be followed, and the schema is strict. Leave it out, or set strict to false"
        )
    return made, found.left_out


def say_once(what: str, left_out: list[str]) -> None:
    """List in the log, once, what of a schema is not followed."""
    _SAID.add(left_out, what)


def _schema(schema: Any, place: _Place, found: _Found, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > DEEPEST_LEVELS:
        return schema
    made: dict[str, Any] = {}
    replaced: dict[str, Any] = {}
    for key, value in schema.items():
        at = place.at(key)
        if value is None and key != "const":
            continue  # as serializers write what is not set
        if key in ("properties", "patternProperties", *_TABLES) and isinstance(value, Mapping):
            made[key] = {name: _schema(each, at.at(name), found, depth + 1) for name, each in value.items()}
        elif key in ("allOf", "anyOf", "oneOf", "prefixItems", "items") and isinstance(value, list):
            made[key] = [_schema(each, at.at(i), found, depth + 1) for i, each in enumerate(value)]
        elif key in ("items", "additionalItems", "additionalProperties"):
            made[key] = _schema(value, at, found, depth + 1)
        elif key in _FOLLOWED or key in _KEPT:
            made[key] = value
        elif key in _CONSTRAINING and not _says_nothing(key, value):
            replaced |= _replaced(key, value, schema, at, found)
        elif key in place.referred:
            made[key] = _definitions(value, at, found, depth + 1)  # by another name
    if _is_never(schema.get("not")):
        return False
    if "patternProperties" in replaced:  # names were bound by a pattern
        replaced["patternProperties"] = dict.fromkeys(
            replaced["patternProperties"], made.get("additionalProperties", True)
        )
    made |= replaced
    _format(made)
    _type(made, place, found)
    _numbers(made, place, found)
    _pattern(made, place, found)
    _properties(made, place, found)
    _one_of(made, schema, place, found)
    return _or_null(made) if schema.get("nullable") is True else made


def _is_never(negated: Any) -> bool:
    """Whether nothing is valid: zod's and TypeBox's never."""
    return negated is True or negated == {}


def _or_null(made: dict[str, Any]) -> dict[str, Any]:
    """A schema that OpenAPI 3.0 calls nullable. Places within it stay where they are, as far as that goes."""
    if not _NULLABLE & made.keys():
        return made
    kinds = [made["type"]] if isinstance(made.get("type"), str) else made.get("type")
    if isinstance(kinds, list) and not {"$ref", "allOf", "anyOf", "oneOf"} & made.keys():
        made["type"] = kinds if "null" in kinds else [*kinds, "null"]
        values = [made.pop("const")] if "const" in made else made.get("enum")
        return made | ({"enum": [*values, None]} if isinstance(values, list) and None not in values else {})
    tables = {key: made.pop(key) for key in _TABLES if key in made}
    return {"anyOf": [made, {"type": "null"}], **tables}


def _definitions(value: Any, place: _Place, found: _Found, depth: int) -> Any:
    """A schema that something refers to, or a table with some at any level, such as OpenAPI's components."""
    if isinstance(value, Mapping) and depth <= DEEPEST_LEVELS and not place.referred.is_schema:
        return {
            name: _definitions(each, place.at(name), found, depth + 1)
            for name, each in value.items()
            if name in place.referred
        }
    return _schema(value, place, found, depth)


def _referred(schema: Any) -> _Names:
    """What a schema's references name."""
    names = _Names()
    for key, place in entries_of(schema):
        if key == "$ref" and isinstance(place, str) and place.startswith("#/"):
            way, at = names_in(place), names
            for name in way[:_MOST_NAMES]:
                at = at.setdefault(name, _Names())
            at.is_schema = at.is_schema or len(way) <= _MOST_NAMES
    return names


def _says_nothing(key: str, value: Any) -> bool:
    return (key == "uniqueItems" and value is False) or (
        key == "propertyNames" and value in (True, {}, {"type": "string"})
    )


def _replaced(key: str, value: Any, schema: Mapping[str, Any], at: _Place, found: _Found) -> dict[str, Any]:
    """Keywords that say the same; none where there are none."""
    if key == "not" and _is_never(value):
        return {}
    if key == "propertyNames" and not schema.get("patternProperties") and not schema.get("properties"):
        pattern = _pattern_of_names(parts_of(value, found.root))
        if pattern is not None and _is_followed(found, "pattern", pattern):
            return {"patternProperties": {pattern: True}, "additionalProperties": False}
    found.leave_out(at)
    return {}


def _pattern_of_names(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """A pattern for names that follow a schema; None if one keyword alone does not say it."""
    rules = {key: value for part in parts for key, value in part.items() if key not in {*_KEPT, "$ref", "type"}}
    if any(part.get("type", "string") != "string" for part in parts):
        return None
    names = [rules["const"]] if rules.keys() == {"const"} else rules.get("enum") if rules.keys() == {"enum"} else None
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return "^(" + "|".join(map(re.escape, names)) + ")$"
    pattern = rules.get("pattern")
    if rules.keys() == {"pattern"} and isinstance(pattern, str):
        return pattern
    lengths = [rules.get("minLength", 0), rules.get("maxLength", 0)]
    are_followed = all(isinstance(length, int) and 0 <= length <= _LONGEST_NAME for length in lengths)
    if rules.keys() and rules.keys() <= {"minLength", "maxLength"} and are_followed:
        return f"^(?s:.{{{lengths[0]:d},{rules.get('maxLength', '')}}})$"
    return None


def _format(made: dict[str, Any]) -> None:
    """A format that is not known describes a value, and says nothing about it."""
    kind = made.get("format")
    if isinstance(kind, str) and kind not in _FORMATS:
        del made["format"]


def _type(made: dict[str, Any], place: _Place, found: _Found) -> None:
    """Leave out a type that JSON has not, such as TypeBox's "RegExp"."""
    kind = made.get("type")
    kinds = [kind] if isinstance(kind, str) else kind
    if isinstance(kinds, list) and any(isinstance(each, str) and each not in _TYPES for each in kinds):
        del made["type"]
        found.leave_out(place.at("type"))


def _numbers(made: dict[str, Any], place: _Place, found: _Found) -> None:
    """Whole counts, and bounds that llguidance takes: it has not those of all 64-bit integers and of float32."""
    for key in _COUNTS:
        if isinstance(value := made.get(key), float) and value.is_integer():
            made[key] = int(value)
    bounds = {key: made[key] for key in _BOUNDS if isinstance(made.get(key), int | float)}
    for key in [key for key, value in bounds.items() if abs(value) >= sys.float_info.max]:
        if (bounds[key] < 0) == ("inimum" in key):  # zod's of a double, which all are within
            del made[key], bounds[key]
    large = [key for key, value in bounds.items() if abs(value) > _LARGE_BOUND]
    if large and not _is_taken(found, {"type": made.get("type", "number"), **bounds}):
        for key in large:
            del made[key]
            found.leave_out(place.at(key))


def _pattern(made: dict[str, Any], place: _Place, found: _Found) -> None:
    pattern = made.get("pattern")
    if isinstance(pattern, str):
        made["pattern"] = pattern = _SAME_PATTERNS.get(pattern, pattern)
        if not _is_followed(found, "pattern", pattern):
            del made["pattern"]
            found.leave_out(place.at("pattern"))
    patterns = made.get("patternProperties")
    if isinstance(patterns, dict) and not _is_followed(found, "patternProperties", *patterns):
        del made["patternProperties"]
        made.pop("additionalProperties", None)
        found.leave_out(place.at("patternProperties"))


def _properties(made: dict[str, Any], place: _Place, found: _Found) -> None:
    """Numbers of properties, which llguidance counts where all that are named are required."""
    table, required = made.get("properties"), made.get("required", [])
    if isinstance(table, Mapping) and isinstance(required, list) and not table.keys() <= _required(made):
        for key in ("minProperties", "maxProperties"):
            if made.pop(key, None):
                found.leave_out(place.at(key))


def _is_followed(found: _Found, key: str, *patterns: str) -> bool:
    """Whether llguidance takes these patterns. One that may take long to compile is not tried here."""
    if any(_AROUND.search(_PLAIN.sub("x", each)) for each in patterns):
        return False
    if not all(GrammarSource("regex", each).is_cheap for each in patterns) or len(patterns) > _MOST_PATTERNS:
        return True
    return _is_taken(found, {key: patterns[0] if key == "pattern" else {each: {} for each in patterns}})


def _is_taken(found: _Found, schema: Mapping[str, Any]) -> bool:
    """Whether llguidance takes a small schema, unless it was asked too often."""
    found.num_tried += 1
    return found.num_tried > _MOST_TRIED or _is_valid(json.dumps(schema))


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


def _one_of(made: dict[str, Any], schema: Mapping[str, Any], place: _Place, found: _Found) -> None:
    """Schemas that exclude each other: anyOf says the same."""
    several = made.get("oneOf")
    if not isinstance(several, list) or "anyOf" in made:
        return
    if not isinstance(schema.get("discriminator"), Mapping):
        found.num_compared += len(several)
        if found.num_compared <= _MOST_COMPARED and _is_kept([_resolved(each, found.root) for each in schema["oneOf"]]):
            return
        if found.num_compared > _MOST_COMPARED or not exclude_each_other(schema["oneOf"], found.root):
            found.leave_out(place.at("oneOf"), " (followed as anyOf)")
    made["anyOf"] = made.pop("oneOf")


def _resolved(schema: Any, root: Any) -> Any:
    """A schema, or the definition that it refers to."""
    place = schema.get("$ref") if isinstance(schema, Mapping) else None
    return target_of(place, root) if isinstance(place, str) and place.startswith("#/") else schema


def _is_kept(schemas: list[Any]) -> bool:
    """Whether llguidance takes `oneOf` of these.

    It does where it sees that no value follows two of them: by type, by value, or by a property's value.
    """
    if not all(isinstance(each, Mapping) for each in schemas):
        return False
    if all("const" in each or "enum" in each for each in schemas):
        return True
    objects = [each for each in schemas if each.get("type") == "object"]
    types = [each.get("type") for each in schemas if each.get("type") != "object"]
    if (
        not all(isinstance(kind, str) for kind in types)
        or len({*types}) < len(types)
        or {"integer", "number"} <= {*types}
    ):
        return False
    tables = [each.get("properties") for each in objects]
    if len(objects) < 2 or not all(isinstance(table, Mapping) for table in tables):
        return len(objects) < 2
    keys = set.intersection(*(_required(each, MOST_VALUES) for each in objects))
    return any(
        all(isinstance(table.get(key), Mapping) and _value_of(table[key]) is not None for table in tables)
        and len({_value_of(table[key]) for table in tables}) == len(tables)
        for key in keys
    )


def _required(schema: Mapping[str, Any], most: int | None = None) -> set[str]:
    names = schema.get("required")
    return {name for name in names[:most] if isinstance(name, str)} if isinstance(names, list) else set()


def _value_of(schema: Mapping[str, Any]) -> str | None:
    """The one value that a schema allows, as text."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return repr(values[0]) if isinstance(values, list) and len(values) == 1 else None
