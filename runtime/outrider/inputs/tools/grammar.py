"""A grammar for answers that call functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from outrider.errors import OptionError, one_line, quoted
from outrider.inputs.tools.arguments import Tags
from outrider.inputs.tools.formats import ToolFormat
from outrider.inputs.tools.markers import in_regex, literal, marker_in_lark, tags_in_lark
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
from outrider.tokens.grammar import (
    JSON_STYLE,
    GrammarSource,
    check_length,
    say_once,
    widened,
    with_real_dates,
)
from outrider.types import TextTokenizer

_THOUGHTS = ("<think>", "</think>", "[THINK]", "[/THINK]")  # markers that a free text may have
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def source_of_calls(
    form: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    only: str | None,
    tokenizer: TextTokenizer,
    *,
    once: bool = False,
    free: bool = False,
    schema: Any = None,
) -> GrammarSource:
    """A grammar for calls of functions, as the chat template writes them.

    tools: as in OpenAI's API. only: the one function to call, once; None: any, and as often as the format has it.
    once: one call at most. free: there may be text, and need not be a call. schema: a JSON schema for that text; there
    are calls or the text then, not both.

    Raises:
        OptionError: for parameters whose schema cannot be followed in this format.
    """
    functions = [tool["function"] for tool in tools if only in (None, tool["function"]["name"])]
    bodies, in_json = list[str](), _Json()
    for i, function in enumerate(functions):
        try:
            functions[i] = _followed(function)
            bodies += _body(form, f"body_{i}", functions[i], tokenizer, in_json)
        except ValueError as error:
            raise OptionError(f"tools cannot be followed: in {function['name']!r}, {one_line(error)}.") from error
    calls = _Calls(form, tokenizer, once=once or only is not None)
    rules = [f"start: {calls.all}"]
    if free:
        rules = calls.free if schema is None else [f"start: answer | {calls.all}", calls.answer(schema)]
    rules.append(f"body: {' | '.join(f'body_{i}' for i in range(len(functions)))}")
    rules += bodies
    parts = tuple((each["name"], json.dumps(each.get("parameters") or {})) for each in functions)
    if schema is not None:
        parts = (("json_schema", json.dumps(schema)), *parts)
    return GrammarSource("tools", "\n".join(rules), parts=parts)


def _followed(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function whose parameters have what the grammar can follow. Raises ValueError for a strict one with more."""
    parameters = function.get("parameters")
    if not parameters:
        return function
    made, left_out = widened(parameters, strict=bool(function.get("strict")))
    say_once(f"the function {quoted(function['name'])}", left_out)
    return {**function, "parameters": made}


class _Calls:
    """The rules around the bodies of calls.

    all: calls and nothing else. free: rules for an answer in which there may be some.
    """

    def __init__(self, form: ToolFormat, tokenizer: TextTokenizer, *, once: bool) -> None:
        self._form, self._once, self._tokenizer = form, once, tokenizer
        self._thoughts = [marker_in_lark(marker, tokenizer) for marker in _THOUGHTS]
        self._begin, self._end = (marker_in_lark(marker, tokenizer) for marker in (form.begin, form.end))
        blank = literal(form.blank)
        self._more = "" if once or not form.separator else f"({literal(f'{form.separator} ')} body)*"
        if form.separator:  # one marker for all calls
            opener = literal("" if form.bare else form.blank + form.opener)
            self._after = f"{opener} body {self._more} {literal(form.closer)} {self._end}"
        else:
            self._after = f"{blank} body {blank} {self._end}"
        call = f"{self._begin} {self._after}"
        if form.bare:
            self.all = f"body {self._more}"
        else:
            self.all = call if once or form.separator else f"{call} ({blank} {call})*"

    def answer(self, schema: Any) -> str:
        """The rule for a text in JSON in place of calls."""
        header = ""
        if self._form.channels:
            channel, message = (marker_in_lark(f"<|{name}|>", self._tokenizer) for name in ("channel", "message"))
            header = f'{channel} "final" ({tags_in_lark(self._form.typed, self._tokenizer)})? {message} '
        return f"answer: {header}{_json(schema)}"

    @property
    def free(self) -> list[str]:
        """TEXT: without the marker of a call, and no call that has none."""
        form, begin = self._form, self._begin
        if form.channels:
            return self._messages
        is_token = begin.startswith("<[")
        call = f"text {begin} {self._after}" if is_token else f"opened {self._after}"
        after = "" if self._once else "text"
        start = f"text | {call} {after}" if self._once or form.separator else f"({call})* text"
        rules = [f"start: {start}" + (f" | {self.all}" if form.bare else "")]
        thoughts = " | ".join(filter(lambda each: each.startswith("<["), self._thoughts))
        rules.append(f"text: TEXT (({thoughts}) TEXT)*" if thoughts else "text: TEXT")
        if not is_token:
            rules.append(f"opened[suffix={begin}]: TEXT")
        without = [f"(?s:.*){in_regex(form.begin)}(?s:.*)", *([r'\s*\{\s*"name"(?s:.*)'] if form.bare else [])]
        return [*rules, "TEXT: /(?s:.*)/" + "".join(f" & ~/{each}/" for each in without)]

    @property
    def _messages(self) -> list[str]:
        """The same for answers of gpt-oss: messages with a channel each, of which the last one or some are calls."""
        marker = partial(marker_in_lark, tokenizer=self._tokenizer)
        typed = tags_in_lark(self._form.typed, self._tokenizer)
        each, last = ("message", "(message | call)") if self._once else ("(message | call)", "(message | call)")
        return [
            f'start: TEXT | ({each} {marker("<|start|>")} "assistant")* {last}',
            f"call: {self._begin} {self._after}",
            f"message: {marker('<|channel|>')} KIND ({typed})? {marker('<|message|>')} TEXT {marker('<|end|>')}?",
            "KIND: /analysis|commentary|final/",
            "TEXT: /(?s:.*)/",
        ]


def _body(
    form: ToolFormat, rule: str, function: Mapping[str, Any], tokenizer: TextTokenizer, in_json: Callable[[Any], str]
) -> list[str]:
    """The rules for a call of one function, without what is around it."""
    name, parameters = function["name"], function.get("parameters") or _NO_PARAMETERS
    if form.syntax:
        return _held_to(function, *form.syntax.rules(rule, function, tokenizer, in_json))
    if form.tags:
        return _held_to(function, *rules_of_arguments(form.tags, rule, function, tokenizer, in_json))
    arguments = f"arguments_{rule}: {in_json(parameters)}"
    if form.named:
        typed = f"({tags_in_lark(form.typed, tokenizer)})?" if form.typed else ""
        return [f"{rule}: {literal(name)} {typed} {marker_in_lark(form.named, tokenizer)} arguments_{rule}", arguments]
    head = f'{{"name": {json.dumps(name)}, {json.dumps(form.key)}: '
    return [f'{rule}: {literal(head)} arguments_{rule} "}}"', arguments]


def _held_to(function: Mapping[str, Any], rules: list[str], left_out: list[str]) -> list[str]:
    """The rules of a function, of whose schema some places are not followed: they are listed in the log.

    Raises:
        OptionError: for a strict function.
    """
    if left_out and function.get("strict"):
        raise OptionError(
            f"tools cannot be followed: {function['name']!r} is strict, and in the syntax of this model's calls "
            f"nothing can be held to {left_out[0]}. Leave it out, or set strict to false."
        )
    say_once(f"the function {quoted(function['name'])}", left_out)
    return rules


def _json(schema: Any) -> str:
    """JSON by a schema."""
    made = with_real_dates(schema)
    return f"%json {json.dumps({'x-guidance': JSON_STYLE} | made if isinstance(made, dict) else made)}"


class _Json:
    """JSON by schemas, of limited length together: each may have all definitions of its function."""

    def __init__(self) -> None:
        self._num_characters = 0

    def __call__(self, schema: Any) -> str:
        """The expression for one of them. Raises ValueError for too much."""
        made = _json(schema)
        self._num_characters += len(made)
        check_length(self._num_characters)
        return made


def rules_of_arguments(
    tags: Tags, rule: str, function: Mapping[str, Any], tokenizer: TextTokenizer, in_json: Callable[[Any], str]
) -> tuple[list[str], list[str]]:
    """Rules for a function's name and arguments: those that are required, and others, in the schema's order.

    Returns also the places of what values that are written as plain text cannot be held to.
    """
    name, parameters = function["name"], function.get("parameters") or {}
    left_out = [f"/{keyword}" for keyword in sorted(parameters.keys() - OF_OBJECTS)]
    properties, required = properties_of(parameters)
    line, end = literal(tags.line), literal(tags.end)
    rules, places = list[str](), list[str]()
    for i, (key, schema) in enumerate(properties.items()):
        place = f"{rule}_{i}"
        places.append(place if key in required else f"{place}?")
        head = tags_in_lark(f"{tags.key[0]}{key}{tags.key[1]}{tags.value[0]}", tokenizer)
        values, odd = _values(f"{place}_value", tags, schema, parameters, tokenizer, in_json)
        rules += [f"{place}: {head} {place}_value {line}", *values]
        left_out += [f"/properties/{key[:100]}/{keyword[:100]}" for keyword in odd]
    head = literal(f"{tags.name[0]}{name}{tags.name[1]}")
    return [f"{rule}: {head} {line} {' '.join(places)} {end}", *rules], left_out


def _values(
    rule: str,
    tags: Tags,
    schema: Any,
    root: Mapping[str, Any],
    tokenizer: TextTokenizer,
    in_json: Callable[[Any], str],
) -> tuple[list[str], list[str]]:
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
            others.append(in_json({**definitions_of(root), **branch}))
    if not sizes:
        return [f"{rule}: ({' | '.join(others)}) {tags_in_lark(tags.value[1], tokenizer)}"], left_out
    tag, text = tags.value[1].strip(), f"/(?s:.{{{sizes[0]}}})/"  # what else is allowed can be written as text too
    marker = marker_in_lark(tag, tokenizer)
    if marker == literal(tag):
        return [f"{rule}[suffix={marker}]: {text}"], left_out
    rules = [f"{rule}: {rule.upper()} {marker}", f"{rule.upper()}: {text} & ~/(?s:.*){in_regex(tag)}(?s:.*)/"]
    return rules, left_out
