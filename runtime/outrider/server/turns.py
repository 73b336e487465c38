"""From the items of /v1/responses to the turns of a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.server.errors import ApiError
from outrider.server.options import arguments_of
from outrider.server.protocol.items import InputImagePart

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq

    from outrider.server.protocol.items import InputItem, InputPart, OutputCall, OutputMessage

Turn = dict[str, Any]


def turns_of_input(given: str | Seq[InputItem], before: Seq[Mapping[str, Any]]) -> list[Turn]:
    """The turns of a request's input, for the chat template. before: the turns that they follow.

    Raises:
        ApiError: with status 400, for items that lack something, and outputs of calls that were not made.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    turns = list[Turn]()
    calls = {call["id"]: call["function"]["name"] for turn in before for call in turn.get("tool_calls", ())}
    for i, item in enumerate(given):
        _check(item, i)
        if item.type == "message":
            role = "system" if item.role == "developer" else item.role
            turns.append({"role": role, "content": _content(item.content or "", f"input[{i}].content")})
        elif item.type == "function_call":
            _add_call(turns, item)
            calls[item.call_id] = item.name
        elif item.call_id in calls:
            content = _content(item.output or "", f"input[{i}].output")
            turns.append({
                "role": "tool", "tool_call_id": item.call_id, "name": calls[item.call_id], "content": content
            })  # fmt: skip
        else:
            message = (
                f"No call before this output has the call_id '{str(item.call_id)[:100]}'. Send its function_call too."
            )
            raise ApiError(400, message, param=f"input[{i}].call_id", code="invalid_value")
    return turns


def turn_of_output(items: Seq[OutputMessage | OutputCall]) -> Turn:
    """The turn that an answer is."""
    turns: list[Turn] = [{"role": "assistant", "content": ""}]
    for item in items:
        if item.type == "message":
            turns[0]["content"] += item.content[0].text
        else:
            _add_call(turns, item)
    return turns[0]


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


def _check(item: InputItem, place: int) -> None:
    fields = {name for names in _NEEDED.values() for name in names}
    for name in sorted(fields):
        is_needed, is_given = name in _NEEDED[item.type], getattr(item, name) is not None
        if is_needed and not is_given:
            raise ApiError(400, f"A {item.type} needs {name}.", param=f"input[{place}].{name}", code="invalid_type")
        if is_given and not is_needed and name != "name":
            raise ApiError(400, f"A {item.type} has no {name}.", param=f"input[{place}].{name}", code="unknown_field")


def _add_call(turns: list[Turn], call: InputItem | OutputCall) -> None:
    """Add a call to the answer that it is part of: text and calls are one turn for a chat template."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": ""})
    function = {"name": call.name, "arguments": arguments_of(call.arguments or "")}
    turns[-1].setdefault("tool_calls", []).append({"id": call.call_id, "type": "function", "function": function})


def _content(content: str | Seq[InputPart], place: str) -> str | list[dict[str, Any]]:
    """A turn's content: a text, or its parts if there is an image among them, as those of a chat."""
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{place}[{i}]") for i, part in enumerate(content)]
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _part(part: InputPart, place: str) -> dict[str, Any]:
    if not isinstance(part, InputImagePart):
        return {"type": "text", "text": part.text}
    if part.file_id is not None:
        message = "No files are stored here. Send the image itself as image_url, data:image/…;base64,…"
        raise ApiError(400, message, param=f"{place}.file_id", code="unsupported_field")
    if part.image_url is None:
        message = "An input_image needs image_url: data:image/…;base64,…"
        raise ApiError(400, message, param=f"{place}.image_url", code="invalid_type")
    return {"type": "image_url", "image_url": {"url": part.image_url}}
