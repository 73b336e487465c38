"""Messages for chat templates that have no tools, or refuse system messages, or several of one role in a row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_BETWEEN_TURNS = "\n\n"  # as Gemma's template has it after a system message, and Ollama between turns of one role

# Begins the template of requests with tools where the model's own has none, as a sign for `ToolFormat`.
TOLD_OF_TOOLS = "{#- calls in <tool_call> tags, which the model is told of -#}"
TOLD = "You can call functions."  # in the text, if the model is told of them


def told_of_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with tools described in a system message, and calls and their results as texts.

    Calls are in Hermes 2's tags, which many models have seen. Arguments are objects, or texts that are no JSON.
    """
    described = "\n".join(map(_json, tools))
    told = (
        f"{TOLD} These are described by JSON schemas, one a line:\n{described}\nTo call one, answer with its name and "
        'its arguments in JSON between tags, such as:\n<tool_call>\n{"name": "the_name", "arguments": {"key": "value"}}'
        "\n</tool_call>\nYou are given its result then. Answer in words where no function is needed."
    )
    made: list[dict[str, Any]] = []
    results: list[str] = []  # of the calls before
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        made += _results(results)
        results = []
        made.append(_with_calls_as_text(message))
    made += _results(results)
    if made and made[0]["role"] == "system":
        return [{**made[0], "content": _joined(made[0]["content"], told)}, *made[1:]]
    return [{"role": "system", "content": told}, *made]


def _results(results: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "\n".join(results)}] if results else []


def _with_calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    functions = [call["function"] for call in calls if isinstance(call.get("function"), Mapping)]
    if not functions:
        return dict(message)
    shown = [_json({"name": each.get("name"), "arguments": each.get("arguments")}) for each in functions]
    written = [f"<tool_call>\n{call}\n</tool_call>" for call in shown]
    text = "\n".join(filter(None, [message["content"], *written]))
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def joined_turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, those of the user or the assistant that follow each other as one; calls stay apart."""
    made: list[dict[str, Any]] = []
    for message in messages:
        last = made[-1] if made else {}
        is_same = message["role"] in ("user", "assistant") and last.get("role") == message["role"]
        if is_same and not (last.get("tool_calls") or message.get("tool_calls")):
            made[-1] = {**last, **message, "content": _joined(last["content"], message["content"])}
        else:
            made.append(dict(message))
    return made


def without_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, system messages as those of the user, which begin the message after them if it is the user's."""
    return [{**message, "role": "user"} if message["role"] == "system" else dict(message) for message in messages]


def _joined(first: Any, second: Any) -> Any:
    """Two contents, which are texts or lists of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return _BETWEEN_TURNS.join(filter(None, (first, second)))
    return [
        part
        for each in (first, second)
        for part in ([{"type": "text", "text": each}] if isinstance(each, str) else each)
    ]
