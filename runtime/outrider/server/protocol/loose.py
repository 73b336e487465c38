"""What others write in other words: names and values that mean the same here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from outrider.config import GenerationConfig
from outrider.config.option import options_of
from outrider.server.errors import ApiError
from outrider.server.protocol.requests import SERVED
from outrider.server.protocol.reshaping import reshape
from outrider.system.listed import ListedOnce

IGNORED = ListedOnce(
    logging.getLogger("outrider.server"), "Requests have what has no effect here, and is ignored from now on: %s."
)

_AS_MANY_AS_FIT = 2**31 - 1  # tokens
_LEAST_TEMPERATURE = 1e-3  # below it, sampling is greedy

# Other servers' names of fields: llama.cpp's, vLLM's, SGLang's, TGI's, Ollama's, text-generation-webui's, Qwen's.
_OWN_NAMES = {"max_new_tokens": "max_tokens"}  # the requests' name of an option
SAME = {
    "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens", "num_return_sequences": "n",
    **_OWN_NAMES,
    **{
        alias: _OWN_NAMES.get(name, name)
        for name, described in options_of(GenerationConfig).items() for alias in described.aliases
    },
}  # fmt: skip
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Fields of numbers and of true or false, which some clients write as texts.
_NUMBERS = {name for name, each in SERVED.items() if each.values.kind in (int, float)} | {
    "best_of", "logprobs", "n", "seed", "top_logprobs", *_LENGTHS
}  # fmt: skip
_FLAGS = {name for name, each in SERVED.items() if each.values.kind is bool} | {
    "add_generation_prompt", "continue_final_message", "echo", "enable_thinking", "include_reasoning",
    "parallel_tool_calls", "return_progress", "return_tokens", "store", "stream"
}  # fmt: skip
_TRUTHS = {"true": True, "false": False}
WRITTEN_AS_TEXTS = _NUMBERS | _FLAGS
_WINDOWS = ("repeat_last_n", "repetition_penalty_range", "rep_pen_range")
_NEUTRAL_PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}


def normalised(fields: Mapping[str, Any], known: set[str]) -> tuple[dict[str, Any], list[str]]:
    """A copy of a request's fields with this server's names and values, and what was skipped.

    Raises:
        ApiError: with status 400, for two names of one field with different values.
    """
    made = dict(fields)
    if made.get("model") is None:
        made.pop("model", None)
    for name, own in SAME.items():
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
        if name in _FLAGS and isinstance(value, int) and value in (0, 1):
            made[name] = bool(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:  # Lua and others have no integers
            made[name] = int(value)
    if made.get("best_of") == (made.get("n") or 1):
        made.pop("best_of", None)  # all of them are given out
    if "top_logprobs" in known and made.get("logprobs") in (0, 1):  # of a chat; a completion has a number
        made["logprobs"] = bool(made["logprobs"])
    elif isinstance(made.get("logprobs"), bool):
        made["logprobs"] = int(made["logprobs"]) or None
    for name in ("grammar", "regex"):
        if made.get(name) == "":
            made[name] = None
    _set_lengths(made)
    _set_sampling(made)
    _set_stop(made)
    return made, skipped + _skip_tools(made) + _skip_window(made)


def _read_text(name: str, text: str) -> Any:
    """The number, or the truth, that a field of these has as a text; the text itself of others."""
    if name in _FLAGS or (name == "logprobs" and text.lower() in _TRUTHS):
        return _TRUTHS.get(text.lower(), text)
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
    elif isinstance(stop, list):
        fields["stop"] = [each for each in stop if each not in ("", None)] or None


def _skip_window(fields: dict[str, Any]) -> list[str]:
    """Leave out the number of last tokens that penalties are for, where it changes nothing: here they are for all."""
    windows = {name: fields.pop(name) for name in _WINDOWS if name in fields}
    has_penalty = any(fields.get(name) not in (None, neutral) for name, neutral in _NEUTRAL_PENALTIES.items())
    for name, window in windows.items():
        if has_penalty and window not in (None, -1):
            message = f"{name} is not supported: penalties are for all tokens. Set it to -1, or leave it out."
            raise ApiError(400, message, param=name, code="unsupported_field")
    return [*windows]


def _skip_tools(fields: dict[str, Any]) -> list[str]:
    """Leave out tools that are no functions: the model is not told of them, so it does not call them."""
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return []
    kinds = [_kind_of(tool) for tool in tools]
    skipped = {kind if isinstance(kind, str) else type(kind).__name__ for kind in kinds if kind != "function"}
    functions = dict[bytes, Any]()  # each once
    for tool, kind in zip(tools, kinds, strict=True):
        if kind == "function":
            functions.setdefault(msgspec.json.encode(tool, order="sorted"), tool)
    fields["tools"] = [*functions.values()] or None
    if not fields["tools"] and fields.get("tool_choice") in ("auto", "none"):
        fields["tool_choice"] = None
    return [f"tools of type {kind}" for kind in skipped]


def _kind_of(tool: Any) -> Any:
    """The type of a tool. Google's hosted tools have their name alone."""
    if not isinstance(tool, dict):
        return "function"
    is_hosted = len(tool) == 1 and tool.keys().isdisjoint(("function", "name", "type"))
    return tool.get("type") or (next(iter(tool)) if is_hosted else "function")
