"""/v1/messages: Anthropic's Messages API, as another form of chats."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from outrider.decoding.results import Result, TextChunk
from outrider.inputs.reasoning import Thought
from outrider.server.answers import AnswerHead, SingleAnswer
from outrider.server.chat import reading_of
from outrider.server.conversations import Conversations
from outrider.server.errors import ApiError, in_anthropic_s_words
from outrider.server.options import BETWEEN_PARTS, AnswerChoice, choices_of_chat
from outrider.server.protocol.loose import IGNORED
from outrider.server.protocol.messages import (
    DocumentBlock,
    GivenMessage,
    ImageBlock,
    MediaSource,
    MessageEvent,
    MessageObject,
    MessagesRequest,
    MessageUsage,
    StopReason,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from outrider.server.protocol.reading import as_request, read_fields, read_object
from outrider.server.protocol.requests import ChatRequest, TextPart
from outrider.server.reader import Piece
from outrider.server.usage import timings_of

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
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in functions
        ],
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


class Messages(SingleAnswer[ChatRequest]):
    """The answer to a chat, as a message of blocks."""

    kind = ChatRequest
    prefix = "msg_"

    def __init__(self, request: ChatRequest, head: AnswerHead, choices: Sequence[AnswerChoice]) -> None:
        super().__init__(request, head, choices, reading_of(request, head))
        self._content: list[dict[str, Any]] = []  # the last one may grow still
        self._has_begun = False

    @classmethod
    def read(cls, body: bytes) -> ChatRequest:
        """The chat that a body asks for."""
        return read_messages(body)

    @staticmethod
    def choices(request: ChatRequest, conversations: Conversations) -> list[AnswerChoice]:  # noqa: ARG004
        """The one answer."""
        return choices_of_chat(request)[:1]

    def whole(self, results: Sequence[Result]) -> MessageObject:
        """The answer in one body."""
        result = results[0]
        for _ in self._read(result.text, result, thinks=result.thinks):
            pass
        content = [block | {"input": _input(block["input"])} if "input" in block else block for block in self._content]
        return self._message(content, result, timings=timings_of([result.stats]))

    def begin(self) -> Iterator[MessageEvent]:
        """Nothing comes before the prompt's tokens are counted, with the first piece."""
        return iter(())

    def events(self, number: int, chunk: TextChunk) -> Iterator[MessageEvent]:  # noqa: ARG002
        """What a piece adds."""
        if not self._has_begun:
            self._has_begun = True
            usage = _usage(chunk.stats.num_prompt_tokens, chunk.stats.num_cached_tokens, 0)
            begun = MessageObject(id=self.head.id, model=self.head.model, content=[], usage=usage)
            yield MessageEvent(type="message_start", message=begun)
        yield from self._read(chunk.text, chunk.result, thinks=chunk.thinks)
        if result := chunk.result:
            whole = self._message([], result)
            ended = {"stop_reason": whole.stop_reason, "stop_sequence": whole.stop_sequence}
            yield MessageEvent(type="message_delta", delta=ended, usage=whole.usage)
            yield MessageEvent(type="message_stop")

    def failure(self, error: ApiError) -> MessageEvent:
        """The event that ends a stream which fails."""
        return MessageEvent(type="error", error=in_anthropic_s_words(error))

    def _read(self, text: str, result: Result | None, *, thinks: bool) -> Iterator[MessageEvent]:
        for piece in self._pieces(text, result, thinks=thinks):
            yield from self._add(piece)
        if result:
            if not self._content:
                yield from self._begin({"type": "text", "text": ""})
            yield from self._end()

    def _add(self, piece: Piece) -> Iterator[MessageEvent]:
        if isinstance(piece, Thought):
            yield from self._grow("thinking", "thinking", piece.text, "thinking_delta", "thinking")
        elif isinstance(piece, str):
            yield from self._grow("text", "text", piece, "text_delta", "text")
        else:
            if piece.name is not None:
                call = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": piece.name, "input": ""}
                yield from self._begin(call)
            if piece.arguments:
                yield from self._grow("tool_use", "input", piece.arguments, "input_json_delta", "partial_json")

    def _grow(self, kind: str, key: str, text: str, delta: str, name: str) -> Iterator[MessageEvent]:
        """Add text to the last block, which is begun if it is of another kind."""
        if not self._content or self._content[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, key: "", **signature})
        self._content[-1][key] += text
        yield self._of_block("content_block_delta", delta={"type": delta, name: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[MessageEvent]:
        yield from self._end()
        self._content.append(block)
        shown = block | ({"input": {}} if "input" in block else {})
        yield self._of_block("content_block_start", content_block=shown)

    def _end(self) -> Iterator[MessageEvent]:
        if self._content:
            yield self._of_block("content_block_stop")

    def _of_block(self, kind: Any, **fields: Any) -> MessageEvent:
        return MessageEvent(type=kind, index=len(self._content) - 1, **fields)

    def _message(self, content: list[dict[str, Any]], result: Result, **more: Any) -> MessageObject:
        stats = result.stats
        return MessageObject(
            id=self.head.id,
            model=self.head.model,
            content=content,
            usage=_usage(stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_generated_tokens),
            stop_reason=self._stop_reason(result),
            stop_sequence=result.stop_string,
            **more,
        )

    def _stop_reason(self, result: Result) -> StopReason:
        if result.stop_string is not None:
            return "stop_sequence"
        if result.finish_reason == "length":
            return "max_tokens"
        return "tool_use" if self._reader is not None and self._reader.has_called else "end_turn"


def _usage(num_prompt: int, num_cached: int, num_generated: int) -> MessageUsage:
    return MessageUsage(num_prompt - num_cached, num_generated, num_cached)


def _input(written: str) -> Any:
    """A call's arguments as an object; none of a call that was cut."""
    try:
        return msgspec.json.decode(written)
    except msgspec.DecodeError:
        return {}
