"""Reads an answer's text: the model's reasoning, calls of functions, and what is said besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from outrider.decoding.results import Result
from outrider.inputs.reasoning import ReasoningFormat, Thought
from outrider.inputs.reasoning.calls import CallsWithin
from outrider.inputs.reasoning.stream import Splitter
from outrider.inputs.tools import ToolCallDelta, ToolFormat
from outrider.server.logprobs import TokenTexts

Piece: TypeAlias = Thought | str | ToolCallDelta


@dataclass(frozen=True)
class AnswerReading:
    """How a request's answers are read.

    reasoning: the model's form; None to leave it in the text. calls: how the model writes calls; None to leave them
    there. loose: whether JSON without a marker may be a call.
    once: leave out calls that repeat an earlier one, which small models make where calls are required.
    """

    reasoning: ReasoningFormat | None = None
    calls: ToolFormat | None = None
    max_calls: int | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    loose: bool = True
    once: bool = False

    def reader(self, *, thinks: bool) -> Reader:
        """The reader of one answer. thinks: it begins within the reasoning."""
        return Reader(self, thinks=thinks)

    def markers(self, texts: TokenTexts) -> dict[int, str]:
        """The texts of tokens that have none but as markers of reasoning and calls."""
        return texts.markers(tuple(marker for form in (self.reasoning, self.calls) if form for marker in form.markers))

    def count(self, result: Result, texts: TokenTexts) -> int:
        """How many of an answer's tokens are reasoning."""
        if self.reasoning is None or not result.tokens:
            return 0
        markers = self.markers(texts)
        read = (markers.get(token.token_id) or texts[token.token_id] for token in result.tokens)
        is_cut = result.finish_reason == "length"
        return self.reasoning.count(read, is_cut=is_cut, opened=result.thinks, **self._of_calls)

    @property
    def _of_calls(self) -> dict[str, Any]:
        return {"calls": self.calls, "tools": self.tools, "loose": self.loose} if self.calls else {}

    def splits(self, *, thinks: bool) -> Splitter | CallsWithin | None:
        """Splits an answer into reasoning and the rest; None where the reasoning is left in the text."""
        return self.reasoning.stream(opened=thinks, **self._of_calls) if self.reasoning else None


class Reader:
    """One answer, as it comes. has_called: whether it has a call. is_cut: whether its last call is not complete."""

    def __init__(self, reading: AnswerReading, *, thinks: bool) -> None:
        self._reasoning = reading.splits(thinks=thinks)
        form, options = reading.calls, {"loose": reading.loose, "once": reading.once}
        self._calls = form.stream(reading.max_calls, reading.tools, **options) if form else None
        self.has_called = False

    @property
    def is_cut(self) -> bool:
        """Whether the answer has ended within a call."""
        return self._calls is not None and self._calls.is_in_call

    def read(self, text: str, result: Result | None) -> list[Piece]:
        """Add text. Returns what is certain now; with the whole answer's `result`, what was held back, too."""
        return self.push(text) + (self.finish(result) if result else [])

    def push(self, text: str) -> list[Piece]:
        """Add text. Returns what is certain now."""
        if not text:
            return []
        return self._read(self._reasoning.push(text) if self._reasoning else [text])

    def finish(self, result: Result) -> list[Piece]:
        """Return what was held back, as no text follows. result: the whole answer."""
        is_cut = result.finish_reason == "length"
        pieces = self._read(self._reasoning.finish(is_cut=is_cut) if self._reasoning else [])
        return pieces + (self._found(self._calls.finish(is_cut=is_cut)) if self._calls else [])

    def _read(self, given: Sequence[Thought | str]) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in given:
            if isinstance(piece, Thought) or self._calls is None:
                pieces.append(piece)
            else:
                pieces += self._found(self._calls.push(piece))
        return pieces

    def _found(self, pieces: list[str | ToolCallDelta]) -> list[str | ToolCallDelta]:
        self.has_called = self.has_called or any(isinstance(piece, ToolCallDelta) for piece in pieces)
        return pieces
