"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import UNSET

from outrider.server.conversations import Conversations
from outrider.server.dialect import ChoicePiece, Dialect, News, Part, ServedAnswer, ServedChoice, Wanted
from outrider.server.logprobs import TokenTexts, chat_logprobs
from outrider.server.protocol.reading import read_request
from outrider.server.protocol.requests import ChatRequest
from outrider.server.protocol.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    FunctionCall,
    FunctionPart,
    Message,
    PromptProgress,
    ServedToolCall,
    ToolCallPart,
)
from outrider.types import TokenLogprobs


def _to_chat(body: bytes, _: Conversations) -> Wanted:
    return Wanted(read_request(body, ChatRequest))


def _body(answer: ServedAnswer) -> ChatCompletion:
    choices = [_choice(answer, said) for said in answer.choices]
    return ChatCompletion(choices=choices, **answer.head.fields, **answer.totals)


def _choice(answer: ServedAnswer, said: ServedChoice) -> ChatChoice:
    result: Any = said.result
    made = [ServedToolCall(f"call_{call.id}", FunctionCall(call.name, call.text)) for call in said.calls]
    content, reasoning = said.text, said.thoughts
    thoughts: Any = {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
    message = Message(content or None, tool_calls=made, **thoughts) if made else Message(content, **thoughts)
    logprobs = _logprobs(result.logprobs, answer.head.texts)
    return ChatChoice(said.number, message, said.finish_reason, logprobs, result.seed, **answer.tokens(result.tokens))


def _events(answer: ServedAnswer, step: ChoicePiece) -> Iterator[ChatChunk]:
    """What a piece adds. The first event of a choice says whose turn it is."""
    number, chunk = step.said.number, step.chunk
    if step.is_first:
        yield _chunk(answer, [_empty(number)])
    more = {"logprobs": _logprobs(chunk.logprobs, answer.head.texts), **answer.tokens(chunk.tokens)}
    deltas = [delta for news in step.news if (delta := _delta(news))]
    for delta in deltas or ([Delta(content="")] if chunk.tokens else []):
        yield _chunk(answer, [ChatChunkChoice(number, delta, **more)])
        more = {}  # they come with the first of these events
    if chunk.result:
        ended = ChatChunkChoice(number, Delta(), step.said.finish_reason, seed=chunk.result.seed)
        yield _chunk(answer, [ended], **(answer.timings if step.is_last and not answer.wants_usage else {}))
    if step.is_last and answer.wants_usage:
        yield _chunk(answer, [], **answer.totals)


def _empty(number: int) -> ChatChunkChoice:
    return ChatChunkChoice(number, Delta(role="assistant", content=""))


def _progress(answer: ServedAnswer, number: int, progress: PromptProgress) -> ChatChunk:
    return _chunk(answer, [_empty(number)], prompt_progress=progress)


def _chunk(answer: ServedAnswer, choices: Sequence[ChatChunkChoice], **fields: Any) -> ChatChunk:
    usage = None if answer.wants_usage else UNSET
    return ChatChunk(choices=list(choices), **{"usage": usage} | answer.head.fields | fields)


def _logprobs(tokens: Sequence[TokenLogprobs] | None, texts: TokenTexts) -> ChatLogprobs | None:
    return None if tokens is None else chat_logprobs(tokens, texts)


def _delta(news: News) -> Delta | None:
    """What news of a part add to the message: text, and calls of functions."""
    part = news.part
    if part.kind == "call":
        return _call(news, part)
    if news.kind != "grown":
        return None
    if part.kind == "thought":
        return Delta(reasoning_content=news.text, reasoning=news.text)
    return Delta(content=news.text)


def _call(news: News, part: Part) -> Delta | None:
    if news.kind == "begun":
        begun = ToolCallPart(part.call_index, FunctionPart("", part.name), f"call_{part.id}", "function")
        return Delta(tool_calls=[begun])
    return Delta(tool_calls=[ToolCallPart(part.call_index, FunctionPart(news.text))]) if news.kind == "grown" else None


CHAT = Dialect(
    "/v1/chat/completions", "chatcmpl-", _to_chat, _events, _body, progress=_progress, last="[DONE]"
)  # fmt: skip
