"""A grammar for arguments that are written one by one, between tags."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from outrider.errors import OptionError
from outrider.inputs.tools.markers import in_regex, literal, marker_in_lark, tags_in_lark
from outrider.inputs.tools.values import branches, table_of, values_of
from outrider.tokens.grammar import JSON_STYLE, with_real_dates

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outrider.inputs.tools.arguments import Tags
    from outrider.types import TextTokenizer

_ABOUT = {"title", "description", "default", "examples", "deprecated", "$comment", "x-guidance"}  # change nothing
_OF_OBJECTS = _ABOUT | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_OF_STRINGS = _ABOUT | {"type", "minLength", "maxLength"}


def rules_of_arguments(tags: Tags, rule: str, function: Mapping[str, Any], tokenizer: TextTokenizer) -> list[str]:
    """Rules for a function's name and arguments: those that are required, and others, in the schema's order.

    Raises:
        OptionError: for a schema that values written as plain text cannot be held to.
    """
    name, parameters = function["name"], function.get("parameters") or {}
    if odd := sorted(parameters.keys() - _OF_OBJECTS):
        _refuse(f"the parameters of {name!r} have {odd[0]!r}")
    required = [key for key in _listed(parameters.get("required")) if isinstance(key, str)]
    known = table_of(parameters, "properties")
    properties = {**known} | {key: {} for key in required if key not in known}
    line, end = literal(tags.line), literal(tags.end)
    rules, places = list[str](), list[str]()
    for i, (key, schema) in enumerate(properties.items()):
        place = f"{rule}_{i}"
        places.append(place if key in required else f"{place}?")
        head = tags_in_lark(f"{tags.key[0]}{key}{tags.key[1]}{tags.value[0]}", tokenizer)
        try:
            values = _values(f"{place}_value", tags, schema, parameters, tokenizer)
        except _NotKept as keyword:
            _refuse(f"{key!r} of {name!r} has {keyword}")
        rules += [f"{place}: {head} {place}_value {line}", *values]
    head = literal(f"{tags.name[0]}{name}{tags.name[1]}")
    return [f"{rule}: {head} {line} {' '.join(places)} {end}", *rules]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class _NotKept(Exception):
    """A keyword of a schema that no text between tags is held to."""


def _values(rule: str, tags: Tags, schema: Any, root: Mapping[str, Any], tokenizer: TextTokenizer) -> list[str]:
    """Rules for a value and the tag behind it."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    sizes, others = list[str](), list[str]()
    for branch in branches(schema, root):
        values = values_of(branch)
        odd = sorted(branch.keys() - _OF_STRINGS)
        if values is not None:
            others += [json.dumps(each if isinstance(each, str) else json.dumps(each)) for each in values]
        elif branch.get("type") == "string" and odd:
            raise _NotKept(repr(odd[0]))
        elif branch.get("type") == "string" or not branch.keys() - _ABOUT:
            sizes.append(f"{branch.get('minLength', 0)},{branch.get('maxLength', '')}")
        else:
            others.append(
                f"%json {json.dumps({'x-guidance': JSON_STYLE} | with_real_dates({**definitions, **branch}))}"
            )
    if not sizes:
        return [f"{rule}: ({' | '.join(others)}) {tags_in_lark(tags.value[1], tokenizer)}"]
    tag, text = tags.value[1].strip(), f"/(?s:.{{{sizes[0]}}})/"  # what else is allowed can be written as text too
    marker = marker_in_lark(tag, tokenizer)
    if marker == literal(tag):
        return [f"{rule}[suffix={marker}]: {text}"]
    return [f"{rule}: {rule.upper()} {marker}", f"{rule.upper()}: {text} & ~/(?s:.*){in_regex(tag)}(?s:.*)/"]


def _refuse(what: str) -> NoReturn:
    raise OptionError(
        f"tools cannot be followed: {what}, and this model writes arguments as plain text, which cannot be held to "
        "that. Leave it out, or set tool_choice='auto' without strict."
    )
