"""JSON values of arguments that a model writes as plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from outrider.errors import OptionError

_KINDS = {bool: ("boolean",), int: ("integer", "number"), float: ("number",), str: ("string",), type(None): ("null",),
          list: ("array",), dict: ("object",)}  # fmt: skip
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates write these values in earlier calls
ABOUT = {"title", "description", "default", "examples", "deprecated", "$comment", "x-guidance"}  # change nothing
# What rules of a format follow of an object of arguments, and of a text.
OF_OBJECTS = ABOUT | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
OF_STRINGS = ABOUT | {"type", "minLength", "maxLength"}

_DEEPEST = 8  # schemas that refer to others; one may refer to itself
_MOST_BRANCHES = 256  # references may lead to the same ones again and again


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema, or the definition of the root that it refers to."""
    place = schema.get("$ref") if isinstance(schema, Mapping) else None
    if place == "#":
        return root
    parts = place.split("/") if isinstance(place, str) else []
    if len(parts) != 3 or parts[0] != "#" or parts[1] not in ("$defs", "definitions"):
        return schema
    return table_of(root, parts[1]).get(parts[2])


def branches(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas of which a value follows one, each with one type at most. One that is not understood says nothing."""
    found = list(islice(_branches(schema, root, 0), _MOST_BRANCHES + 1))
    return found if len(found) <= _MOST_BRANCHES else [{}]


def _branches(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    found = resolved(schema, root)
    if not isinstance(found, Mapping) or depth == _DEEPEST:
        yield {}
    elif found is not schema:
        yield from _branches(found, root, depth + 1)
    elif several := next((found[key] for key in ("anyOf", "oneOf") if _is_list(found.get(key))), None):
        for each in several:
            yield from _branches(each, root, depth + 1)
    elif _is_list(found.get("type")) and values_of(found) is None:
        yield from ({**found, "type": name} for name in found["type"])
    else:
        yield found


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def values_of(branch: Mapping[str, Any]) -> list[Any] | None:
    """The only values that a schema allows; None for others too."""
    if "const" in branch:
        return [branch["const"]]
    return branch["enum"] if _is_list(branch.get("enum")) else None


def table_of(schema: Any, key: str) -> Mapping[str, Any]:
    """The table at a key of a schema; an empty one if there is none."""
    found = schema.get(key) if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def definitions_of(root: Mapping[str, Any]) -> dict[str, Any]:
    """What schemas within this one may refer to."""
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def properties_of(schema: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The properties of an object, those that are only required among them, and which are required."""
    known, listed = table_of(schema, "properties"), schema.get("required")
    required = [key for key in listed if isinstance(key, str)] if isinstance(listed, list) else []
    return {**known} | {key: {} for key in required if key not in known}, {*required}


def bounds_in_lark(schema: Mapping[str, Any], of: str) -> str:
    """The least and the most of a schema's `minLength` and `maxLength`, say, as a grammar repeats: "0," for any."""
    least, most = schema.get(f"min{of}", 0), schema.get(f"max{of}", "")
    if not all(each == "" or (isinstance(each, int | float) and each >= 0) for each in (least, most)):
        raise OptionError(f"tools cannot be followed: a schema has min{of} or max{of} that is no number of at least 0.")
    return f"{int(least)},{most if most == '' else int(most)}"


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str] | None:
    """The JSON types that a schema allows; None if it does not say."""
    types = set[str]()
    for branch in branches(schema, root):
        values = values_of(branch)
        if values is not None:
            types.update(kind for value in values for kind in _KINDS.get(type(value), ()))
        elif isinstance(branch.get("type"), str):
            types.add(branch["type"])
        else:
            return None
    return types


def as_json(text: str, types: set[str] | None) -> str:
    """The JSON of a value that was written as text.

    It is JSON already if it can be read so, and one of the types; else it is a string. types: None for any.
    """
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    written = _PYTHON.get(text.strip(), text.strip())
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kinds = {*_KINDS[type(value)]} | ({"integer"} if isinstance(value, float) and value.is_integer() else set())
    return written if types is None or kinds & types else json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(name)
