"""Finds a model's reasoning in a text that grows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from outrider.inputs.text.stream import num_held


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the reasoning."""

    text: str


class Splitter(ABC):
    """Splits a text that grows into reasoning and answer. However the text is cut, the pieces add up to the same."""

    has_called = is_calling = False  # as `CallsWithin` has them, which finds calls

    def __init__(self) -> None:
        self.content: list[tuple[int, int]] = []  # where the answer itself is in the text: (begin, end) of each part
        self._left = ""  # the end of the text, which no piece has yet
        self._size = 0  # characters of the text

    @property
    @abstractmethod
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that no piece has yet: they may belong to a marker."""
        return len(self._left)

    def push(self, text: str) -> list[Thought | str]:
        """Add text. Returns what is certain now."""
        self._left += text
        self._size += len(text)
        pieces: list[Thought | str] = []
        while self._advance(pieces):
            pass
        return pieces

    @abstractmethod
    def finish(self, *, is_cut: bool = False) -> list[Thought | str]:
        """Return what was held back, as no text follows."""

    @abstractmethod
    def _advance(self, pieces: list[Thought | str]) -> bool:
        """Take what is certain from `_left`. Returns whether there may be more."""

    def _located(self, text: str) -> str:
        """A part of the answer itself, which `_left` begins with."""
        begin = self._size - len(self._left)
        if self.content and self.content[-1][1] == begin:
            begin, _ = self.content.pop()
        self.content.append((begin, self._size - len(self._left) + len(text)))
        return text


class MarkedReasoning(Splitter):
    """Reasoning between two markers at the beginning of an answer.

    begin, end: the markers. opened: the prompt has ended with `begin`. around: texts that may stand around the answer
    itself. Blanks around markers are dropped; other text is never changed.
    """

    def __init__(self, begin: str, end: str, *, opened: bool = False, around: tuple[str, str] = ("", "")) -> None:
        super().__init__()
        self._begin, self._end = begin, end
        self._opener, self._closer = around
        self._said = False  # whether some reasoning was given out
        self._opened = opened
        self._step = self._before
        self._after_reasoning = False

    @property
    def is_reasoning(self) -> bool:
        """Whether the reasoning has begun, and not ended."""
        return self._step == self._inside or (self._step == self._before and self._opened)

    def finish(self, *, is_cut: bool = False) -> list[Thought | str]:  # noqa: ARG002
        """Return what was held back, as no text follows."""
        rest = self._left
        if self.is_reasoning:
            rest = rest.rstrip()
            rest = rest if self._said else rest.lstrip()
            pieces: list[Thought | str] = [Thought(rest)] if rest else []
        else:
            if self._after_reasoning and self._closer:
                rest = rest.rstrip().removesuffix(self._closer)
            pieces = [self._located(rest)] if rest else []
        self._left = ""
        return pieces

    def _advance(self, pieces: list[Thought | str]) -> bool:
        return self._step(pieces)

    def _before(self, pieces: list[Thought | str]) -> bool:  # noqa: ARG002
        """At the beginning: a marker, or text."""
        text = self._left.lstrip()
        if not text or (self._begin.startswith(text) and text != self._begin):
            return False
        if text.startswith(self._begin):
            self._left, self._step = text[len(self._begin) :], self._inside
        else:
            self._step = self._inside if self._opened else self._answer
        return True

    def _inside(self, pieces: list[Thought | str]) -> bool:
        before, marker, rest = self._left.partition(self._end)
        if not self._said:
            before = before.lstrip()
        certain = before.rstrip() if marker else before[: len(before) - num_held(before, self._end)].rstrip()
        if certain:
            pieces.append(Thought(certain))
            self._said = True
        if not marker:
            self._left = before[len(certain) :]
            return False
        self._left, self._step, self._after_reasoning = rest, self._after, True
        return True

    def _after(self, pieces: list[Thought | str]) -> bool:  # noqa: ARG002
        """Blanks after the reasoning, and what the answer may begin with."""
        self._left = self._left.lstrip()
        if not self._left:
            return False
        if self._opener and self._left.startswith(self._opener):
            self._left = self._left[len(self._opener) :].lstrip()
            self._opener = ""
            return True
        if self._opener and self._opener.startswith(self._left):
            return False
        self._step = self._answer
        return True

    def _answer(self, pieces: list[Thought | str]) -> bool:
        text = self._left
        if self._closer and self._after_reasoning:  # the last blanks may stand before the closer
            text = text[: len(text) - num_held(text, self._closer, whole=True)].rstrip()
        if text:
            pieces.append(self._located(text))
            self._left = self._left[len(text) :]
        return False
