"""Calls whose arguments are written one by one between tags, as plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outrider.inputs.tools.bodies import OPEN, CallBody, CallText, GrammarParts, Rules, Schemas, head_by_name, offered
from outrider.inputs.tools.markers import in_regex, literal
from outrider.inputs.tools.shapes import ToolCall
from outrider.inputs.tools.values import (
    ABOUT,
    OF_OBJECTS,
    OF_STRINGS,
    as_json,
    bounds_in_lark,
    branches,
    definitions_of,
    properties_of,
    table_of,
    types_of,
    values_of,
)


@dataclass(frozen=True)
class Tags(CallBody):
    """A function's name and its arguments. Values become JSON by its schema, or by what they look like without one."""

    name: tuple[str, str]  # around the function's name
    key: tuple[str, str]  # around an argument's key
    value: tuple[str, str]  # around a value
    end: str = ""  # after the last argument
    line: str = "\n"  # between all of these
    padded: bool = False  # line breaks around a value are no part of it

    def read(self, text: str, opener: str, end: str, schemas: Schemas) -> CallText | None:  # noqa: ARG002
        """Read a call, or one whose arguments are JSON up to these."""
        return self._read(text, ("",) if self.name[1] else (self.key[0], end), schemas)

    def read_unmarked(self, text: str, schemas: Schemas) -> CallText | None:
        """The same without the format's marker: JSON, or a tag, has to follow the name."""
        return self._read(text, ("{", self.key[0], self.end), schemas)

    def _read(self, text: str, ahead: tuple[str, ...], schemas: Schemas) -> CallText | None:
        whole, part = head_by_name(*self.name, *ahead)
        found = whole.match(text)
        if found is None:
            return OPEN if part.fullmatch(text) else None
        if text.startswith("{", found.end()):
            return CallText((ToolCall(found[1], ""),), found.end(), "arguments")
        arguments, size = self._arguments(text, found.end(), schemas.get(offered(found[1], schemas)) or {})
        calls = (ToolCall(found[1], arguments),)
        return CallText(calls) if size is None else CallText(calls, size, "whole")

    def _arguments(self, text: str, at: int, schema: Mapping[str, Any]) -> tuple[str, int | None]:
        """The arguments in JSON, as far as they have come, and where they end; None: not yet."""
        made = ""
        while found := self._key_or_end.search(text, at):
            key = found[1]
            if key is None:
                return made + "}" if made else "{}", found.end()
            end = self._after_value.search(text, found.end())
            if end is None:
                break
            value = text[found.end() : end.start()]
            types = types_of(table_of(schema, "properties").get(key), schema)
            value = as_json(value.removeprefix("\n") if self.padded else value, types)
            made += f"{', ' if made else '{'}{json.dumps(key, ensure_ascii=False)}: {value}"
            at = end.end()
        return made, None

    @cached_property
    def _key_or_end(self) -> re.Pattern[str]:
        """Matches up to the next value, with the key as group 1, or the end, without."""
        begin, after, value = map(re.escape, (*self.key, self.value[0].strip()))
        between = rf"\s*{value}" if value else ""
        end = f"|{re.escape(self.end)}" if self.end else ""
        return re.compile(f"{begin}[\"']?([^<>]*?)[\"']?{after}{between}{end}|(?=</tool_call>)")

    @cached_property
    def _after_value(self) -> re.Pattern[str]:
        """What ends a value: its tag or, where it is missing, on the next line another key or the end."""
        tag, others = re.escape(self.value[1].strip()), "|".join(map(re.escape, (self.key[0], self.end)))
        return re.compile(f"\n?{tag}|\n(?={others})" if self.padded else tag)

    @cached_property
    def markers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The tags of arguments."""
        tags = (text.strip() for text in (*self.key, *self.value))
        return tuple(tag for tag in tags if tag.startswith("<") and tag.endswith(">"))

    @property
    def next_begin(self) -> str:  # type: ignore[override]
        """The tag before another name."""
        return self.name[0]

    def rules(self, rule: str, function: Mapping[str, Any], parts: GrammarParts) -> Rules:
        """Rules for name and arguments: those that are required, and others, in the schema's order."""
        name, parameters = function["name"], function.get("parameters") or {}
        left_out = [f"/{keyword}" for keyword in sorted(parameters.keys() - OF_OBJECTS)]
        properties, required = properties_of(parameters)
        line, end = literal(self.line), literal(self.end)
        rules, places = list[str](), list[str]()
        for i, (key, schema) in enumerate(properties.items()):
            place = f"{rule}_{i}"
            places.append(place if key in required else f"{place}?")
            head = parts.tags(f"{self.key[0]}{key}{self.key[1]}{self.value[0]}")
            values, odd = self._values(f"{place}_value", schema, parameters, parts)
            rules += [f"{place}: {head} {place}_value {line}", *values]
            left_out += [f"/properties/{key[:100]}/{keyword[:100]}" for keyword in odd]
        head = literal(f"{self.name[0]}{name}{self.name[1]}")
        return [f"{rule}: {head} {line} {' '.join(places)} {end}", *rules], left_out

    def _values(self, rule: str, schema: Any, root: Mapping[str, Any], parts: GrammarParts) -> Rules:
        """Rules for a value and the tag after it, and the keywords of a text that they do not follow."""
        sizes, others, left_out = list[str](), list[str](), list[str]()
        for branch in branches(schema, root):
            values = values_of(branch)
            if values is not None:
                others += [json.dumps(each if isinstance(each, str) else json.dumps(each)) for each in values]
            elif branch.get("type") == "string" or not branch.keys() - ABOUT:
                sizes.append(bounds_in_lark(branch, "Length"))
                left_out += sorted(branch.keys() - OF_STRINGS)
            else:
                others.append(parts.json({**definitions_of(root), **branch}))
        if not sizes:
            return [f"{rule}: ({' | '.join(others)}) {parts.tags(self.value[1])}"], left_out
        tag, text = self.value[1].strip(), f"/(?s:.{{{sizes[0]}}})/"  # what else is allowed can be written as text too
        marker = parts.marker(tag)
        if marker == literal(tag):
            return [f"{rule}[suffix={marker}]: {text}"], left_out
        rules = [f"{rule}: {rule.upper()} {marker}", f"{rule.upper()}: {text} & ~/(?s:.*){in_regex(tag)}(?s:.*)/"]
        return rules, left_out


EQUALS_TAGS = Tags(("<function=", ">"), ("<parameter=", ">"), ("\n", "\n</parameter>"), end="</function>", padded=True)
INVOKE_TAGS = Tags(('<invoke name="', '">'), ('<parameter name="', '">'), ("", "</parameter>"), end="</invoke>")
_NAME_TAGS = Tags(('<function name="', '">'), ('<parameter name="', '">'), ("", "</parameter>"), end="</function>")
# By what they begin with: Llama 3's and Qwen3-Coder's, Claude's and MiniMax's, and what small models make of them.
NAMED_TAGS = {tags.name[0]: tags for tags in (EQUALS_TAGS, INVOKE_TAGS, _NAME_TAGS)}
