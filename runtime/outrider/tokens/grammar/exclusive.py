"""Whether JSON schemas exclude each other, so that `oneOf` says the same as `anyOf`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from itertools import combinations, starmap
from typing import Any
from urllib.parse import unquote

_MAX_SCHEMAS = 64  # schemas, of which each pair is compared
_MOST_KEYS = 16  # of which the values are compared
MOST_VALUES = 256  # of an enum, and names that are required
_LONGEST_VALUE = 1_000  # characters
_MOST_PARTS = 32  # of one schema
# By the first character of a value's JSON.
_TYPES = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"} | dict.fromkeys(
    "-0123456789IN", "number"
)


def exclude_each_other(schemas: list[Any], root: Any) -> bool:
    """Whether no value follows two of these: by type, by value, by a property's values, or by a property's name."""
    if len(schemas) > _MAX_SCHEMAS:
        return False
    return all(starmap(_exclude, combinations([_Schema(parts_of(each, root), root) for each in schemas], 2)))


def target_of(place: Any, root: Any) -> Any:
    """What a reference within a schema names; None if there is nothing."""
    if not isinstance(place, str) or not place.startswith("#"):
        return None
    for name in filter(None, names_in(place)):
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def names_in(place: str) -> list[str]:
    """The names on the way to what a reference within a schema names, such as "#/$defs/node" (RFC 6901)."""
    names = unquote(place[1:]).removeprefix("/").split("/")
    return [name.replace("~1", "/").replace("~0", "~") for name in names]


def parts_of(schema: Any, root: Any) -> list[Mapping[str, Any]]:
    """A schema, what it refers to, and what its `allOf` has: a value follows each of these."""
    parts, more = list[Mapping[str, Any]](), [schema]
    while more and len(parts) < _MOST_PARTS:
        part = more.pop()
        if isinstance(part, Mapping):
            parts.append(part)
            several = part.get("allOf")
            more += [target_of(part.get("$ref"), root), *(several[:_MOST_PARTS] if isinstance(several, list) else [])]
    return parts


class _Schema:
    """What is known of a schema, each when it is asked for."""

    def __init__(self, parts: list[Mapping[str, Any]], root: Any) -> None:
        self._parts, self._root = parts, root
        self._properties: dict[str, _Schema] = {}

    @cached_property
    def values(self) -> set[str] | None:
        """The values that it allows, as JSON; None for any number of them."""
        for part in self._parts:
            values = [part["const"]] if "const" in part else part.get("enum")
            if isinstance(values, list) and len(values) <= MOST_VALUES:
                made = {json.dumps(_whole(each), sort_keys=True) for each in values}
                return made if max(map(len, made), default=0) <= _LONGEST_VALUE else None
        return None

    @cached_property
    def types(self) -> set[str]:
        """The types that it allows, of which numbers are one; empty if it does not say."""
        for part in self._parts:
            kinds = [part["type"]] if isinstance(part.get("type"), str) else part.get("type")
            if isinstance(kinds, list) and all(isinstance(each, str) for each in kinds):
                return {"number" if each == "integer" else each for each in kinds}
        return {_TYPES[value[0]] for value in self.values or ()}

    @cached_property
    def required(self) -> set[str]:
        """Keys that an object has."""
        lists = [part.get("required") for part in self._parts]
        known = [name for names in lists if isinstance(names, list) for name in names[:MOST_VALUES]]
        return {name for name in known if isinstance(name, str)}

    def property(self, key: str) -> _Schema:
        """What it says of a key's value."""
        if key not in self._properties:
            tables = [part.get("properties") for part in self._parts]
            parts = [own for each in tables if isinstance(each, Mapping) for own in parts_of(each.get(key), self._root)]
            self._properties[key] = _Schema(parts, self._root)
        return self._properties[key]

    def forbids(self, keys: set[str]) -> bool:
        """Whether no object may have one of these keys."""
        for part in self._parts:
            if part.get("additionalProperties") is False and not part.get("patternProperties"):
                table = part.get("properties")
                if not keys <= (table.keys() if isinstance(table, Mapping) else set()):
                    return True
        return False


def _exclude(one: _Schema, other: _Schema) -> bool:
    if one.types and other.types and not one.types & other.types:
        return True
    if one.values is not None and other.values is not None:
        return not one.values & other.values
    if one.types != {"object"} or other.types != {"object"}:
        return False
    for key in sorted(one.required & other.required)[:_MOST_KEYS]:
        values, more = one.property(key).values, other.property(key).values
        if values is not None and more is not None and not values & more:
            return True
    return other.forbids(one.required) or one.forbids(other.required)


def _whole(value: Any) -> Any:
    """1.0 is 1 in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
