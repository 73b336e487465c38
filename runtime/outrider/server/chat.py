"""/v1/chat/completions."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from outrider.decoding.results import Result, TextChunk
from outrider.inputs.reasoning import Thought, split
from outrider.inputs.tools import ToolCallDelta
from outrider.inputs.tools.stream import joined
from outrider.server.answers import AnswerChoices, AnswerHead, finish_reason
from outrider.server.conversations import Conversations
from outrider.server.logprobs import chat_logprobs
from outrider.server.options import AnswerChoice, choices_of_chat
from outrider.server.protocol.requests import ChatRequest
from outrider.server.protocol.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    FinishReason,
    FunctionCall,
    FunctionPart,
    Message,
    ServedToolCall,
    ToolCallPart,
)
from outrider.server.reader import AnswerReading, Piece, Reader
from outrider.types import TokenLogprobs


class ChatAnswer(AnswerChoices[ChatRequest]):
    """The answer to a chat."""

    kind = ChatRequest
    prefix = "chatcmpl-"

    def __init__(self, request: ChatRequest, head: AnswerHead, choices: Sequence[AnswerChoice]) -> None:
        super().__init__(request, head, choices)
        self._reading = reading_of(request, head)
        self._readers: dict[int, Reader] = {}  # of the choices that are streamed

    @staticmethod
    def choices(request: ChatRequest, conversations: Conversations) -> list[AnswerChoice]:  # noqa: ARG004
        """The n answers."""
        return choices_of_chat(request)

    def whole(self, results: Sequence[Result]) -> ChatCompletion:
        """All choices in one body."""
        choices = [self._choice(i, result) for i, result in enumerate(results)]
        return ChatCompletion(choices=choices, **self.head.fields, **self._totals(results))

    def begin(self) -> Iterator[ChatChunk]:
        """Each choice's first event says whose turn it is."""
        for i in range(len(self._results)):
            yield self._event([ChatChunkChoice(i, Delta(role="assistant", content=""))])

    def _choice(self, number: int, result: Result) -> ChatChoice:
        reader = self._reading.reader(thinks=result.thinks)
        pieces = reader.read(result.text, result)
        reasoning, content = split(piece for piece in pieces if not isinstance(piece, ToolCallDelta))
        _, calls = joined(piece for piece in pieces if isinstance(piece, ToolCallDelta))
        if calls and reader.is_cut and result.finish_reason == "stop":  # by a stop string
            calls.pop()
        made = [ServedToolCall(_new_id(), FunctionCall(call.name, call.arguments)) for call in calls]
        thoughts: Any = {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
        message = Message(content or None, tool_calls=made, **thoughts) if made else Message(content, **thoughts)
        reason = _finish_reason(reader, result)
        tokens, logprobs = self._tokens(result.tokens), self._logprobs(result.logprobs)
        return ChatChoice(number, message, reason, logprobs, result.seed, **tokens)

    def _piece(self, number: int, chunk: TextChunk, **last: Any) -> Iterator[ChatChunk]:
        logprobs, tokens = self._logprobs(chunk.logprobs), self._tokens(chunk.tokens)
        for delta in self._deltas(number, chunk) or ([Delta(content="")] if chunk.tokens else []):
            yield self._event([ChatChunkChoice(number, delta, logprobs=logprobs, **tokens)])
            logprobs, tokens = None, {}  # they come with the first of these events
        if result := chunk.result:
            reason = _finish_reason(self._readers[number], result)
            yield self._event([ChatChunkChoice(number, Delta(), reason, seed=result.seed)], **last)

    def _deltas(self, number: int, chunk: TextChunk) -> list[Delta]:
        """What a piece of text adds to the message: text, and calls of functions."""
        reader = self._readers.get(number)
        if reader is None:
            reader = self._readers[number] = self._reading.reader(thinks=chunk.thinks)
        return [_delta(piece) for piece in reader.read(chunk.text, chunk.result)]

    def _event(self, choices: Sequence[ChatChunkChoice], **fields: Any) -> ChatChunk:
        return ChatChunk(choices=list(choices), **{"usage": self._no_usage_yet} | self.head.fields | fields)

    def _logprobs(self, tokens: Sequence[TokenLogprobs] | None) -> ChatLogprobs | None:
        return None if tokens is None else chat_logprobs(tokens, self.head.texts)


def _finish_reason(reader: Reader, result: Result) -> FinishReason:
    """A call that a stop string has cut is none."""
    reason = finish_reason(result)
    return "tool_calls" if reason == "stop" and reader.has_called and not reader.is_cut else reason


def _delta(piece: Piece) -> Delta:
    if isinstance(piece, Thought):
        return Delta(reasoning_content=piece.text, reasoning=piece.text)
    if isinstance(piece, str):
        return Delta(content=piece)
    if piece.name is None:
        return Delta(tool_calls=[ToolCallPart(piece.index, FunctionPart(piece.arguments))])
    begun = ToolCallPart(piece.index, FunctionPart(piece.arguments, piece.name), _new_id(), "function")
    return Delta(tool_calls=[begun])


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def reading_of(request: ChatRequest, head: AnswerHead) -> AnswerReading:
    """How a chat's answers are read."""
    excluded = request.include_reasoning is False or bool(request.reasoning and request.reasoning.exclude)
    return AnswerReading(
        reasoning=head.reasoning_format if request.reasoning_format != "none" else None,
        calls=head.tool_format if request.tools and request.tool_choice != "none" else None,
        max_calls=1 if request.parallel_tool_calls is False else None,
        tools=msgspec.to_builtins(request.tools or []),
        loose=head.loose_calls,
        once=request.tool_choice == "required",
        shows=not excluded,
    )
