"""What others write in other words: names and values that mean the same here, and keys that are not read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from outrider.server.errors import ApiError
from outrider.server.protocol.requests import (
    SERVED,
    CalledFunction,
    ChatMessage,
    Function,
    JsonSchema,
    MadeCall,
    NamedSchema,
    Tool,
)
from outrider.server.protocol.reshaping import reshape

log = logging.getLogger("outrider.server")

_MOST_LISTED = 200  # names of ignored fields, which clients choose
_LONGEST_NAME = 60  # characters
_AS_MANY_AS_FIT = 2**31 - 1  # tokens
_LEAST_TEMPERATURE = 1e-3  # below it, sampling is greedy

# Other servers' names of fields: llama.cpp's, vLLM's, TGI's, Qwen's.
_SAME = {
    "guided_regex": "regex",
    "min_tokens": "min_new_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "thinking_budget": "reasoning_budget",
    "thinking_budget_tokens": "reasoning_budget",
    "thinking_token_budget": "reasoning_budget",
}
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Fields of numbers and of true or false, which some clients write as texts.
_NUMBERS = {name for name, each in SERVED.items() if each.values.kind in (int, float)} | {
    "best_of", "n", "seed", "top_logprobs", *_LENGTHS
}  # fmt: skip
_FLAGS = {name for name, each in SERVED.items() if each.values.kind is bool} | {"echo", "stream"}
WRITTEN_AS_TEXTS = _NUMBERS | _FLAGS
_PART_KEYS = {"type", "text", "image_url", "refusal", "thinking", "detail", "file_id", "image"}


class Ignored:
    """Lists in the log what is ignored, each name once."""

    def __init__(self) -> None:
        self._listed: set[str] = set()

    def add(self, names: Iterable[str]) -> None:
        """Fields or keys of a request that have no effect."""
        new = {name[:_LONGEST_NAME] for name in names} - self._listed
        if new and len(self._listed) < _MOST_LISTED:
            self._listed |= new
            shown = ", ".join(sorted(map(repr, new)))
            log.warning("Requests have what has no effect here, and is ignored from now on: %s.", shown)


def normalised(fields: Mapping[str, Any], known: set[str]) -> tuple[dict[str, Any], list[str]]:
    """A copy of a request's fields with this server's names and values, and what was skipped.

    Raises:
        ApiError: with status 400, for two names of one field with different values.
    """
    made = dict(fields)
    for name, own in _SAME.items():
        if name in made and name not in known and own in known:
            value = made.pop(name)
            if made.get(own) not in (None, value):
                message = f"{own}={made[own]!r} and {name}={value!r} are two names for one option. Leave one out."
                raise ApiError(400, message, param=name, code="invalid_value")
            made[own] = value
    skipped = reshape(made, known)
    for name, value in made.items():
        if isinstance(value, str):
            made[name] = value = _read_text(name, value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:  # Lua and others have no integers
            made[name] = int(value)
    if made.get("best_of") == (made.get("n") or 1):
        made.pop("best_of", None)  # all of them are given out
    _set_lengths(made)
    _set_sampling(made)
    _set_stop(made)
    return made, skipped + _skip_tools(made)


def _read_text(name: str, text: str) -> Any:
    """The number, or the truth, that a field of these has as a text; the text itself of others."""
    if name in _FLAGS:
        return {"true": True, "false": False}.get(text.lower(), text)
    if name not in _NUMBERS:
        return text
    try:
        return int(text) if len(text) < 20 and text.strip().lstrip("-").isdecimal() else float(text)
    except ValueError:
        return text


def _set_lengths(fields: dict[str, Any]) -> None:
    for name in _LENGTHS:
        value = fields.get(name)
        if value in (-1, -2) or (isinstance(value, int) and value > _AS_MANY_AS_FIT):
            fields[name] = _AS_MANY_AS_FIT
    if fields.get("reasoning_budget") == -1:
        fields["reasoning_budget"] = None


def _set_sampling(fields: dict[str, Any]) -> None:
    """Values that mean greedy, or off."""
    temperature = fields.get("temperature")
    if isinstance(temperature, float) and 0 < temperature < _LEAST_TEMPERATURE:
        fields["temperature"] = 0
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    if fields.get("top_p") == 0 and not isinstance(fields["top_p"], bool):  # the likeliest token alone
        fields |= {"top_p": 1, "top_k": 1}


def _set_stop(fields: dict[str, Any]) -> None:
    """Leave out empty stop strings, which would end nothing."""
    stop = fields.get("stop")
    if stop == "":
        fields["stop"] = None
    elif isinstance(stop, list) and "" in stop:
        fields["stop"] = [each for each in stop if each != ""] or None


def _skip_tools(fields: dict[str, Any]) -> list[str]:
    """Leave out tools that are no functions: the model is not told of them, so it does not call them."""
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return []
    kinds = [tool.get("type", "function") if isinstance(tool, dict) else "function" for tool in tools]
    skipped = {str(kind) for kind in kinds if kind != "function"}
    fields["tools"] = [tool for tool, kind in zip(tools, kinds, strict=True) if kind == "function"] or None
    if not fields["tools"] and fields.get("tool_choice") in ("auto", "none"):
        fields["tool_choice"] = None
    return [f"tools of type {kind}" for kind in skipped]


def unread_keys(fields: Mapping[str, Any]) -> Iterator[str]:
    """The keys in a request's messages and tools that are not read."""
    for message in _objects(fields.get("messages")):
        yield from _others("messages[].", message, ChatMessage.__struct_fields__)
        for part in _objects(message.get("content")):
            yield from _others("messages[].content[].", part, _PART_KEYS)
        for call in _objects(message.get("tool_calls")):
            yield from _others("messages[].tool_calls[].", call, (*MadeCall.__struct_fields__, "type", "index"))
            yield from _others(
                "messages[].tool_calls[].function.", call.get("function"), CalledFunction.__struct_fields__
            )
    is_chat = "messages" in fields
    for tool in _objects(fields.get("tools")):
        if is_chat:
            yield from _others("tools[].", tool, Tool.__struct_fields__)
            yield from _others("tools[].function.", tool.get("function"), Function.__struct_fields__)
    form = fields.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        yield from _others("response_format.", form, (*JsonSchema.__struct_fields__, "type"))
        yield from _others("response_format.json_schema.", form.get("json_schema"), NamedSchema.__struct_fields__)


def _objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _others(place: str, value: object, known: Iterable[str]) -> list[str]:
    return [f"{place}{key}" for key in value.keys() - {*known}] if isinstance(value, dict) else []
