"""Messages joined for chat templates that refuse system messages, or several of one role in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_BETWEEN_TURNS = "\n\n"  # as Gemma's template has it after a system message, and Ollama between turns of one role


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
