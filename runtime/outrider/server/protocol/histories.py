"""Messages as others write them, made into this server's: roles, contents, calls and results in other shapes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

# Other words for roles: Llama 3's, Gemini's, LangChain's.
_ROLES = {"ipython": "tool", "model": "assistant", "ai": "assistant", "human": "user"}
_REASONING = ("reasoning", "reasoning_content", "thinking")
_UNREAD_PARTS = ("redacted_thinking",)  # which nobody can read


def messages_of_others(messages: list[Any]) -> list[Any]:
    """The messages of a chat, in this server's shape as far as they have another one."""
    return _of_functions([_message(each) if isinstance(each, dict) else each for each in messages])


def _message(given: dict[str, Any]) -> dict[str, Any]:
    message = {key: value for key, value in given.items() if key not in _REASONING or isinstance(value, str)}
    role = message.get("role")
    if isinstance(role, str):
        role = message["role"] = _ROLES.get(role.lower(), role.lower())
    if "content" in message:
        message["content"] = content_of_others(message["content"], is_result=role in ("tool", "function"))
    if role in ("user", "system", "developer") and message.get("content") is None:
        message["content"] = ""
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_call(each) if isinstance(each, dict) else each for each in calls]
    if isinstance(message.get("tool_call_id"), int):
        message["tool_call_id"] = str(message["tool_call_id"])
    return message


def content_of_others(content: Any, *, is_result: bool) -> Any:
    """A content: a list of texts as parts, and a part alone as a list. is_result: values of a call become JSON."""
    if isinstance(content, Mapping) and isinstance(content.get("type"), str) and "text" in content:
        content = [content]
    if is_result and content is not None and not isinstance(content, str) and not _are_parts(content):
        return json.dumps(content, ensure_ascii=False)
    if not isinstance(content, list):
        return content
    return [_part(part) for part in content if not (isinstance(part, dict) and part.get("type") in _UNREAD_PARTS)]


def _are_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("type"), str)) for part in content
    )


def _part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict) and "text" in part:
        return {"type": "text"} | part | ({"text": ""} if part["text"] is None else {})
    return part


def _call(given: dict[str, Any]) -> dict[str, Any]:
    """A call: of a custom tool, without the object around it, with a number as its id, with PHP's empty table."""
    call, custom = dict(given), given.get("custom")
    if isinstance(call.get("id"), int):
        call["id"] = str(call["id"])
    if "function" not in call and isinstance(custom, Mapping):
        call["function"] = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    elif "function" not in call and isinstance(call.get("name"), str):
        call["function"] = {key: call.pop(key) for key in ("name", "arguments") if key in call}
    function = call.get("function")
    if isinstance(function, Mapping) and function.get("arguments") == []:
        call["function"] = {**function, "arguments": {}}
    return call


def _of_functions(messages: Iterable[Any]) -> list[Any]:
    """Calls and results as they were written before there were tools: `function_call`, and the role "function"."""
    made: list[Any] = []
    call_id = ""
    for number, message in enumerate(messages):
        if isinstance(message, dict) and isinstance(message.get("function_call"), dict):
            call_id = f"call_{number}"
            rest = {key: value for key, value in message.items() if key != "function_call"}
            made.append({"tool_calls": [{"id": call_id, "function": message["function_call"]}], **rest})
        elif isinstance(message, dict) and message.get("role") == "function":
            made.append({**message, "role": "tool", "tool_call_id": call_id})
        else:
            made.append(message)
    return made
