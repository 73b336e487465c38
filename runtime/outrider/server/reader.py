"""Reads an answer's text: the model's reasoning, calls of functions, and what is said besides."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeAlias

from outrider.decoding.results import AnswerToken, Result
from outrider.inputs.reasoning import ReasoningFormat, Thought
from outrider.inputs.tools import ToolCallDelta, ToolFormat
from outrider.server.logprobs import TokenTexts

Piece: TypeAlias = Thought | str | ToolCallDelta


@dataclass(frozen=True)
class Reading:
    """How a request's answers are read.

    reasoning: the model's form; None to leave it in the text. calls: how the model writes calls; None to leave them
    there. shows: whether the reasoning is part of the answer. loose: whether JSON without a marker may be a call.
    """

    reasoning: ReasoningFormat | None = None
    calls: ToolFormat | None = None
    max_calls: int | None = None
    tools: Seq[Mapping[str, Any]] = ()
    shows: bool = True
    loose: bool = True

    def reader(self, *, thinks: bool) -> Reader:
        """The reader of one answer. thinks: it begins within the reasoning."""
        return Reader(self, thinks=thinks)

    def count(self, tokens: Seq[AnswerToken], texts: TokenTexts, *, thinks: bool) -> int:
        """How many of an answer's tokens are reasoning."""
        if self.reasoning is None or not tokens:
            return 0
        markers = texts.markers(self.reasoning.markers)
        read = (markers.get(token.token_id) or texts[token.token_id] for token in tokens)
        return self.reasoning.count(read, opened=thinks)


class Reader:
    """One answer, as it comes. has_called: whether it has a call. is_cut: whether its last call is not complete."""

    def __init__(self, reading: Reading, *, thinks: bool) -> None:
        self._reasoning = reading.reasoning.stream(opened=thinks) if reading.reasoning else None
        self._calls = (
            reading.calls.stream(reading.max_calls, reading.tools, loose=reading.loose) if reading.calls else None
        )
        self._shows = reading.shows
        self.has_called = False

    @property
    def is_cut(self) -> bool:
        """Whether the answer has ended within a call."""
        return self._calls is not None and self._calls.is_in_call

    def push(self, text: str) -> list[Piece]:
        """Add text. Returns what is certain now."""
        if not text:
            return []
        return self._read(self._reasoning.push(text) if self._reasoning else [text])

    def finish(self, result: Result) -> list[Piece]:
        """Return what was held back, as no text follows. result: the whole answer."""
        pieces = self._read(self._reasoning.finish() if self._reasoning else [])
        is_cut = result.finish_reason == "length"
        return pieces + (self._found(self._calls.finish(is_cut=is_cut)) if self._calls else [])

    def _read(self, given: Seq[Thought | str]) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in given:
            if isinstance(piece, Thought):
                pieces += [piece] if self._shows else []
            elif self._calls is None:
                pieces.append(piece)
            else:
                pieces += self._found(self._calls.push(piece))
        return pieces

    def _found(self, pieces: list[str | ToolCallDelta]) -> list[str | ToolCallDelta]:
        self.has_called = self.has_called or any(isinstance(piece, ToolCallDelta) for piece in pieces)
        return pieces
