"""/v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.decoding.results import TextChunk
from outrider.server.conversations import Conversations
from outrider.server.dialect import ChoicePiece, Dialect, ServedAnswer, ServedChoice, Wanted, whole_chunk
from outrider.server.infill import Infill
from outrider.server.logprobs import completion_logprobs
from outrider.server.protocol.reading import read_request
from outrider.server.protocol.requests import CompletionRequest


def _to_chat(body: bytes, _: Conversations) -> Wanted:
    return Wanted(read_request(body, CompletionRequest))


def _body(answer: ServedAnswer) -> dict[str, Any]:
    choices = [_choice(answer, said, whole_chunk(said.result), is_first=True) for said in answer.choices if said.result]
    return {"object": "text_completion", "choices": choices, **answer.head.fields, **answer.totals}


def _events(answer: ServedAnswer, step: ChoicePiece) -> Iterator[dict[str, Any]]:
    last = answer.timings if step.is_last and not answer.wants_usage else {}
    yield answer.event("text_completion", [_choice(answer, step.said, step.chunk, is_first=step.is_first)], **last)
    if step.is_last and answer.wants_usage:
        yield answer.event("text_completion", [], **answer.totals)


def _choice(answer: ServedAnswer, said: ServedChoice, chunk: TextChunk, *, is_first: bool) -> dict[str, Any]:
    """A piece of a choice. The prompt that is echoed comes with the first one, with its tokens' log-probabilities."""
    texts, more, text = answer.head.texts, answer.tokens(chunk.tokens), chunk.text
    if is_first and answer.request.echo:
        text = _echo(said.choice.prompt, answer) + text
    if chunk.logprobs is not None:
        token_ids, before = (is_first and said.choice.scored) or ((), ())
        first = token_ids[0] if token_ids else None
        more["logprobs"] = completion_logprobs([*before, *chunk.logprobs], texts, said.offsets, first)
    if chunk.result:
        more |= {"finish_reason": said.finish_reason, "seed": chunk.result.seed}
    return {"index": said.number, "text": text, "finish_reason": None, "logprobs": None, **more}


def _echo(prompt: Any, answer: ServedAnswer) -> str:
    """A prompt as text."""
    if isinstance(prompt, Infill):
        return prompt.before
    return prompt if isinstance(prompt, str) else answer.head.texts.text_of(prompt)


def _progress(answer: ServedAnswer, number: int, progress: dict[str, Any]) -> dict[str, Any]:
    empty = {"index": number, "text": "", "finish_reason": None, "logprobs": None}
    return answer.event("text_completion", [empty], prompt_progress=progress)


COMPLETIONS = Dialect("/v1/completions", "cmpl-", _to_chat, _events, _body, progress=_progress, last="[DONE]")
