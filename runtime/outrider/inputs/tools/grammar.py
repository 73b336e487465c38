"""A grammar for answers that call functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import OptionError, one_line, quoted
from outrider.inputs.tools.bodies import GrammarParts, NamedBody, json_in_lark
from outrider.inputs.tools.formats import ToolFormat
from outrider.inputs.tools.markers import in_regex, literal
from outrider.tokens.grammar import GrammarSource, say_once, widened
from outrider.types import TextTokenizer

_THOUGHTS = ("<think>", "</think>", "[THINK]", "[/THINK]")  # markers that a free text may have


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
    bodies, parts = list[str](), GrammarParts(tokenizer)
    for i, function in enumerate(functions):
        try:
            functions[i] = _followed(function)
            rules, left_out = form.body.rules(f"body_{i}", functions[i], parts)
            bodies += _held_to(functions[i], rules, left_out)
        except ValueError as error:
            raise OptionError(f"tools cannot be followed: in {function['name']!r}, {one_line(error)}.") from error
    calls = _Calls(form, parts, once=once or only is not None)
    rules = [f"start: {calls.all}"]
    if free:
        rules = calls.free if schema is None else [f"start: answer | {calls.all}", calls.answer(schema)]
    rules.append(f"body: {' | '.join(f'body_{i}' for i in range(len(functions)))}")
    rules += bodies
    schemas = tuple((each["name"], json.dumps(each.get("parameters") or {})) for each in functions)
    if schema is not None:
        schemas = (("json_schema", json.dumps(schema)), *schemas)
    return GrammarSource("tools", "\n".join(rules), parts=schemas)


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

    def __init__(self, form: ToolFormat, parts: GrammarParts, *, once: bool) -> None:
        self._form, self._once, self._parts = form, once, parts
        self._thoughts = [*map(parts.marker, _THOUGHTS)]
        self._begin, self._end = map(parts.marker, (form.begin, form.end))
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
            channel, message = map(self._parts.marker, ("<|channel|>", "<|message|>"))
            header = f'{channel} "final" ({self._typed})? {message} '
        return f"answer: {header}{json_in_lark(schema)}"

    @property
    def _typed(self) -> str:
        """What a header of gpt-oss' messages may end with."""
        return self._parts.tags(self._form.body.typed) if isinstance(self._form.body, NamedBody) else ""

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
        marker = self._parts.marker
        each, last = ("message", "(message | call)") if self._once else ("(message | call)", "(message | call)")
        return [
            f'start: TEXT | ({each} {marker("<|start|>")} "assistant")* {last}',
            f"call: {self._begin} {self._after}",
            f"message: {marker('<|channel|>')} KIND ({self._typed})? {marker('<|message|>')} TEXT {marker('<|end|>')}?",
            "KIND: /analysis|commentary|final/",
            "TEXT: /(?s:.*)/",
        ]


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
