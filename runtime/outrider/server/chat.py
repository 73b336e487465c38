"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from outrider.server.conversations import Conversations
from outrider.server.dialect import ChoicePiece, Dialect, News, ServedAnswer, ServedChoice, Wanted
from outrider.server.logprobs import TokenTexts, chat_logprobs
from outrider.server.protocol.reading import read_request
from outrider.server.protocol.requests import ChatRequest
from outrider.types import TokenLogprobs

Table: TypeAlias = dict[str, Any]
_CHUNK = "chat.completion.chunk"


def _to_chat(body: bytes, _: Conversations) -> Wanted:
    return Wanted(read_request(body, ChatRequest))


def _body(answer: ServedAnswer) -> Table:
    choices = [_choice(answer, said) for said in answer.choices]
    return {"object": "chat.completion", "choices": choices, **answer.head.fields, **answer.totals}


def _choice(answer: ServedAnswer, said: ServedChoice) -> Table:
    """One of n answers. seed: with which it can be had again; null when greedy."""
    result: Any = said.result
    calls = [{"id": f"call_{call.id}", "type": "function", "function": {"name": call.name, "arguments": call.text}}
             for call in said.calls]  # fmt: skip
    message = {"role": "assistant", "content": said.text, "refusal": None, **_thoughts(said.thoughts)}
    if calls:
        message |= {"content": said.text or None, "tool_calls": calls}
    logprobs = _logprobs(result.logprobs, answer.head.texts)
    ended = {"finish_reason": said.finish_reason, "logprobs": logprobs, "seed": result.seed}
    return {"index": said.number, "message": message, **ended, **answer.tokens(result.tokens)}


def _thoughts(text: str) -> Table:
    """Two names of the reasoning."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _events(answer: ServedAnswer, step: ChoicePiece) -> Iterator[Table]:
    """What a piece adds. The first event of a choice says whose turn it is."""
    number, chunk = step.said.number, step.chunk
    if step.is_first:
        yield answer.event(_CHUNK, [_empty(number)])
    more = {"logprobs": _logprobs(chunk.logprobs, answer.head.texts), **answer.tokens(chunk.tokens)}
    deltas = [delta for news in step.news if (delta := _delta(news))]
    for delta in deltas or ([{"content": ""}] if chunk.tokens else []):
        yield answer.event(_CHUNK, [_piece(number, delta, **more)])
        more = {}  # they come with the first of these events
    if chunk.result:
        ended = _piece(number, {}, finish_reason=step.said.finish_reason, seed=chunk.result.seed)
        yield answer.event(_CHUNK, [ended], **(answer.timings if step.is_last and not answer.wants_usage else {}))
    if step.is_last and answer.wants_usage:
        yield answer.event(_CHUNK, [], **answer.totals)


def _piece(number: int, delta: Table, **more: Any) -> Table:
    return {"index": number, "delta": delta, "finish_reason": None, "logprobs": None, **more}


def _empty(number: int) -> Table:
    return _piece(number, {"role": "assistant", "content": ""})


def _progress(answer: ServedAnswer, number: int, progress: Table) -> Table:
    return answer.event(_CHUNK, [_empty(number)], prompt_progress=progress)


def _logprobs(tokens: Sequence[TokenLogprobs] | None, texts: TokenTexts) -> Table | None:
    return None if tokens is None else {"content": chat_logprobs(tokens, texts), "refusal": None}


def _delta(news: News) -> Table:
    """What news of a part add to the message: text, and calls of functions."""
    part = news.part
    if part.kind == "call" and news.kind == "begun":
        begun = {"id": f"call_{part.id}", "type": "function", "function": {"name": part.name, "arguments": ""}}
        return {"tool_calls": [{"index": part.call_index, **begun}]}
    if news.kind != "grown":
        return {}
    if part.kind == "call":
        return {"tool_calls": [{"index": part.call_index, "function": {"arguments": news.text}}]}
    return _thoughts(news.text) if part.kind == "thought" else {"content": news.text}


CHAT = Dialect(
    "/v1/chat/completions", "chatcmpl-", _to_chat, _events, _body, progress=_progress, last="[DONE]"
)  # fmt: skip
