"""JSON schemas as generators of schemas write them, made ready for llguidance.

What only describes is left out. What has the same meaning in other words is said in these. What llguidance cannot
follow is left out too, so that more is valid, unless the schema is strict.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What llguidance 1.9 follows, and what says nothing about a value. From its `json/schema.rs`.
_FOLLOWED = {
    "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum",
    "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength",
    "minProperties", "minimum", "multipleOf", "oneOf", "pattern", "patternProperties", "prefixItems", "properties",
    "required", "type", "x-guidance",
}  # fmt: skip
_TABLES = {"$defs", "definitions"}
_CONSTRAINING = {
    "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains",
    "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
}  # fmt: skip
_KEPT = {"$schema", "$id", "$anchor", "title", "description"}  # of which llguidance reads or ignores each
_FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid",
}  # fmt: skip
# Pydantic's of a Decimal: a number with one digit at least.
_SAME_PATTERNS = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$"}
_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\(\?>|[+*?}]\+")  # what Rust's regex crate has not
_DEEPEST = 128  # levels

log = logging.getLogger("outrider")
_SAID: set[str] = set()
_MOST_SAID = 200


@dataclass(frozen=True, slots=True)
class _Found:
    """The whole schema, and the places of what is left out."""

    root: Any
    left_out: list[str]


def widened(schema: Any, *, strict: bool = False) -> tuple[Any, list[str]]:
    """A JSON schema that llguidance can follow as far as this is known, and the places of what it leaves out.

    strict: leave out only what says nothing about values. A schema without anything to change comes back equal.

    Raises:
        ValueError: for a strict schema of which something cannot be followed, with the place.
    """
    found = _Found(schema, [])
    made = _schema(schema, "", found, 0)
    if strict and found.left_out:
        raise ValueError(f"{found.left_out[0]} cannot be followed, and the schema is strict")
    return made, found.left_out


def say_once(what: str, left_out: list[str]) -> None:
    """List in the log, once, what of a schema is not followed."""
    new = [place for place in left_out if f"{what} {place}" not in _SAID]
    if new and len(_SAID) < _MOST_SAID:
        _SAID.update(f"{what} {place}" for place in new)
        log.warning("Of the schema of %s, this is not followed: %s.", what, ", ".join(new))


def _schema(schema: Any, place: str, found: _Found, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return schema
    made: dict[str, Any] = {}
    replaced: dict[str, Any] = {}
    for key, value in schema.items():
        at = f"{place}/{key}"
        if key in ("properties", "patternProperties", *_TABLES) and isinstance(value, Mapping):
            made[key] = {name: _schema(each, f"{at}/{name}", found, depth + 1) for name, each in value.items()}
        elif key in ("allOf", "anyOf", "oneOf", "prefixItems", "items") and isinstance(value, list):
            made[key] = [_schema(each, f"{at}/{i}", found, depth + 1) for i, each in enumerate(value)]
        elif key in ("items", "additionalItems", "additionalProperties"):
            made[key] = _schema(value, at, found, depth + 1)
        elif key in _FOLLOWED or key in _KEPT:
            made[key] = value
        elif key in _CONSTRAINING and not _says_nothing(key, value):
            replaced |= _replaced(key, value, schema, at, found)
        elif isinstance(value, Mapping) and _is_referred(value):
            made[key] = value  # a table of definitions by another name
    made |= replaced
    _format(made)
    _pattern(made, place, found)
    _one_of(made, schema, place, found)
    if schema.get("nullable") is True and "type" in made:  # OpenAPI 3.0's
        made = {"anyOf": [made, {"type": "null"}]}
    return made


def _says_nothing(key: str, value: Any) -> bool:
    return (key == "uniqueItems" and value is False) or (
        key == "propertyNames" and value in (True, {}, {"type": "string"})
    )


def _is_referred(value: Mapping[str, Any]) -> bool:
    return any(isinstance(each, Mapping) and "type" in each for each in value.values())


def _replaced(key: str, value: Any, schema: Mapping[str, Any], at: str, found: _Found) -> dict[str, Any]:
    """Keywords that say the same; none where there are none."""
    if key == "propertyNames" and isinstance(value, Mapping) and not schema.get("patternProperties"):
        others = schema.get("additionalProperties", True)
        pattern, names = value.get("pattern"), value.get("enum")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            pattern = "^(" + "|".join(map(re.escape, names)) + ")$"
        if isinstance(pattern, str) and not _AROUND.search(pattern) and not schema.get("properties"):
            return {"patternProperties": {pattern: others}, "additionalProperties": False}
    found.left_out.append(at)
    return {}


def _format(made: dict[str, Any]) -> None:
    """A format that is not known describes a value, and says nothing about it."""
    kind = made.get("format")
    if isinstance(kind, str) and kind not in _FORMATS:
        del made["format"]


def _pattern(made: dict[str, Any], place: str, found: _Found) -> None:
    pattern = made.get("pattern")
    if isinstance(pattern, str):
        made["pattern"] = pattern = _SAME_PATTERNS.get(pattern, pattern)
        if _AROUND.search(pattern):
            del made["pattern"]
            found.left_out.append(f"{place}/pattern")
    patterns = made.get("patternProperties")
    if isinstance(patterns, dict) and any(_AROUND.search(each) for each in patterns):
        del made["patternProperties"]
        made.pop("additionalProperties", None)
        found.left_out.append(f"{place}/patternProperties")


def _one_of(made: dict[str, Any], schema: Mapping[str, Any], place: str, found: _Found) -> None:
    """Schemas of which each has its own value of one property exclude each other: anyOf says the same."""
    several = made.get("oneOf")
    if not isinstance(several, list) or "anyOf" in made:
        return
    if not isinstance(schema.get("discriminator"), Mapping):
        if _exclude_each_other([_resolved(each, found.root) for each in schema["oneOf"]]):
            return
        found.left_out.append(f"{place}/oneOf (followed as anyOf)")
    made["anyOf"] = made.pop("oneOf")


def _resolved(schema: Any, root: Any) -> Any:
    """A schema, or the definition that it refers to."""
    place = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(place, str) or not place.startswith("#/"):
        return schema
    for part in place[2:].split("/"):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def _exclude_each_other(schemas: list[Any]) -> bool:
    """Whether llguidance sees that no value follows two of these: by type, by value, or by a property's value."""
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
    keys = set.intersection(*(_required(each) for each in objects))
    return any(
        all(isinstance(table.get(key), Mapping) and _value_of(table[key]) is not None for table in tables)
        and len({_value_of(table[key]) for table in tables}) == len(tables)
        for key in keys
    )


def _required(schema: Mapping[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _value_of(schema: Mapping[str, Any]) -> str | None:
    """The one value that a schema allows, as text."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return repr(values[0]) if isinstance(values, list) and len(values) == 1 else None
