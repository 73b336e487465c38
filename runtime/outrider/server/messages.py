"""/v1/messages: Anthropic's Messages API, as another form of chats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from outrider.decoding.results import Result
from outrider.server.conversations import Conversations
from outrider.server.dialect import ChoicePiece, Dialect, News, Part, ServedAnswer, ServedChoice, Wanted, first_choice
from outrider.server.errors import ApiError
from outrider.server.options import BETWEEN_PARTS
from outrider.server.protocol.loose import IGNORED
from outrider.server.protocol.messages import (
    DocumentBlock,
    GivenMessage,
    ImageBlock,
    MediaSource,
    MessagesRequest,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from outrider.server.protocol.reading import as_request, read_fields, read_object
from outrider.server.protocol.requests import ChatRequest, TextPart

# Blocks of hosted tools, of which there are none here.
_HOSTED = re.compile("server_tool_use|mcp_tool_use|container_upload|(?:.+_)?tool_result$")


def read_messages(body: bytes) -> ChatRequest:
    """The chat that a body of /v1/messages asks for.

    Raises:
        ApiError: with status 400, naming the field that is wrong.
    """
    return read_message_fields(read_object(body))


def read_message_fields(fields: dict[str, Any]) -> ChatRequest:
    """As `read_messages`, from the body's fields."""
    known = {*MessagesRequest.__struct_fields__}
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [_without_hosted(message) for message in messages]
    others = {name: value for name, value in fields.items() if name not in known}
    asked = as_request({name: value for name, value in fields.items() if name in known}, MessagesRequest)
    return read_fields(others | _chat_of(asked), ChatRequest)


def _without_hosted(message: Any) -> Any:
    """A message without blocks of hosted tools, and results of a search as text."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    kinds = [str(block.get("type")) if isinstance(block, dict) else "" for block in content]
    is_hosted = [kind != "tool_result" and _HOSTED.match(kind) is not None for kind in kinds]
    IGNORED.add(f"blocks of type {kind}" for kind, hosted in zip(kinds, is_hosted, strict=True) if hosted)
    blocks = [_searched(block) for block, hosted in zip(content, is_hosted, strict=True) if not hosted]
    return {**message, "content": blocks}


def _searched(block: Any) -> Any:
    """A result of a search as text, also among those of a call."""
    if not isinstance(block, dict):
        return block
    parts = block.get("content")
    if block.get("type") == "tool_result" and isinstance(parts, list):
        return {**block, "content": [_searched(part) for part in parts]}
    if block.get("type") != "search_result":
        return block
    texts = [part["text"] for part in parts or [] if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return {"type": "text", "text": "\n".join([str(block.get("title")), str(block.get("source")), *texts])}


def _chat_of(asked: MessagesRequest) -> dict[str, Any]:
    """The fields of the chat."""
    system = asked.system if isinstance(asked.system, str | None) else "\n\n".join(part.text for part in asked.system)
    turns = [turn for i, message in enumerate(asked.messages) for turn in _turns(message, i)]
    # Templates take one system message, at the beginning; Claude Code sends more of them among the others.
    systems = [system or "", *(_text_of(turn) for turn in turns if turn["role"] == "system")]
    turns = [turn for turn in turns if turn["role"] != "system"]
    if any(systems):
        turns.insert(0, {"role": "system", "content": "\n\n".join(filter(None, systems))})
    functions = [tool for tool in asked.tools or () if tool.input_schema is not None]
    IGNORED.add(f"tools of type {tool.type}" for tool in asked.tools or () if tool.input_schema is None)
    form = asked.output_format or (asked.output_config and asked.output_config.format)
    choice = asked.tool_choice
    chat: dict[str, Any] = {
        "model": asked.model,
        "messages": turns,
        "max_tokens": asked.max_tokens,
        "stop": asked.stop_sequences or None,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "stream": asked.stream,
        "thinking": asked.thinking and {k: v for k, v in msgspec.to_builtins(asked.thinking).items() if v is not None},
        "reasoning_effort": asked.output_config and asked.output_config.effort,
        "response_format": form and {"type": "json_schema", "json_schema": {"schema": form.schema}},
        "tools": [{**msgspec.to_builtins(tool), "type": "function"} for tool in functions],  # as reshaping reads them
    }
    if choice is not None and functions:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        chat["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        chat["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    return {name: value for name, value in chat.items() if value is not None}


def _text_of(turn: dict[str, Any]) -> str:
    content = turn["content"]
    return content if isinstance(content, str) else BETWEEN_PARTS.join(part.get("text", "") for part in content)


def _turns(message: GivenMessage, place: int) -> list[dict[str, Any]]:
    """A message as turns of a chat: results of calls have turns of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, parts, calls, thoughts = list[dict[str, Any]](), list[dict[str, Any]](), list[Any](), ""
    for i, block in enumerate(message.content):
        at = f"messages[{place}].content[{i}]"
        if isinstance(block, ToolResultBlock):
            given = block.content or ""
            content: Any = given
            if not isinstance(given, str):
                content = [_part(part, f"{at}.content[{j}]") for j, part in enumerate(given)]
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, ToolUseBlock):
            calls.append({"id": block.id, "function": {"name": block.name, "arguments": block.input}})
        elif isinstance(block, ThinkingBlock):
            thoughts += block.thinking
        elif isinstance(block, TextPart | ImageBlock | DocumentBlock):
            parts.append(_part(block, at))
    turn: dict[str, Any] = {"role": message.role, "content": parts}
    turn |= {"tool_calls": calls} if calls else {}
    turn |= {"reasoning_content": thoughts} if thoughts else {}
    return [*results, *([turn] if parts or calls or thoughts or not results else [])]


def _part(block: TextPart | ImageBlock | DocumentBlock, at: str) -> dict[str, Any]:
    if isinstance(block, TextPart):
        return {"type": "text", "text": block.text}
    source = block.source
    if isinstance(block, ImageBlock):
        return {"type": "image_url", "image_url": {"url": _url(source)}}
    if source.type == "text":
        title = f"{block.title}\n" if block.title else ""
        return {"type": "text", "text": title + (source.data or "")}
    message = "Only documents of text are read here. Send the text itself."
    raise ApiError(400, message, param=f"{at}.source.type", code="unsupported_field")


def _url(source: MediaSource) -> str:
    return source.url or f"data:{source.media_type or 'image/png'};base64,{source.data or ''}"


def _to_chat(body: bytes, _: Conversations) -> Wanted:
    return Wanted(read_messages(body))


def _begin(answer: ServedAnswer) -> Iterator[dict[str, Any]]:
    """How many of the prompt's tokens were in the prefix cache is said at the end."""
    yield {"type": "message_start", "message": _message(answer, [], _usage(answer.head.num_prompt_tokens, 0, 0))}


def _events(_: ServedAnswer, step: ChoicePiece) -> Iterator[dict[str, Any]]:
    for news in step.news:
        yield _of_news(news)
    if step.chunk.result:
        usage = _usage_of(step.chunk.result)
        yield {"type": "message_delta", "delta": _ended(step.said, step.chunk.result), "usage": usage}
        yield {"type": "message_stop"}


# Of a kind of part: the type of its deltas, and their key.
_DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _of_news(news: News) -> dict[str, Any]:
    """The event of a part, which is a block of the content."""
    part, index = news.part, news.part.index
    if news.kind == "begun":
        return {"type": "content_block_start", "index": index, "content_block": _block(part)}
    if news.kind == "ended":
        return {"type": "content_block_stop", "index": index}
    kind, key = _DELTAS[part.kind]
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, key: news.text}}


def _block(part: Part) -> dict[str, Any]:
    """A part as a block; the arguments of a call that has begun are an empty object."""
    if part.kind == "thought":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    return {"type": "tool_use", "id": f"toolu_{part.id}", "name": part.name, "input": _input(part.text)}


def _body(answer: ServedAnswer) -> dict[str, Any]:
    (said,), (result,) = answer.choices, answer.results
    content = [_block(part) for part in said.parts]
    return _message(answer, content, _usage_of(result)) | _ended(said, result) | answer.timings


def _message(answer: ServedAnswer, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
    message = {"id": answer.head.id, "type": "message", "role": "assistant", "model": answer.head.model}
    return message | {"content": content, "usage": usage, "stop_reason": None, "stop_sequence": None}


def _ended(said: ServedChoice, result: Result) -> dict[str, Any]:
    """Why an answer has ended."""
    reason = "tool_use" if said.has_called else "end_turn"
    if result.stop_string is not None:
        reason = "stop_sequence"
    elif result.finish_reason == "length":
        reason = "max_tokens"
    return {"stop_reason": reason, "stop_sequence": result.stop_string}


def _ping(_: str) -> dict[str, Any]:
    return {"type": "ping"}


def _usage_of(result: Result) -> dict[str, int]:
    stats = result.stats
    return _usage(stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_generated_tokens)


def _usage(num_prompt: int, num_cached: int, num_generated: int) -> dict[str, int]:
    """input_tokens: of the prompt, without those from the prefix cache."""
    tokens = {"input_tokens": num_prompt - num_cached, "output_tokens": num_generated}
    return tokens | {"cache_read_input_tokens": num_cached, "cache_creation_input_tokens": 0}


def _input(written: str) -> Any:
    """A call's arguments as an object; none of a call that was cut."""
    try:
        return msgspec.json.decode(written)
    except msgspec.DecodeError:
        return {}


MESSAGES = Dialect(
    "/v1/messages", "msg_", _to_chat, _events, _body, begin=_begin, ping=_ping, choices=first_choice,
    named=True,
)  # fmt: skip
