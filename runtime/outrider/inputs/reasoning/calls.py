"""Calls of functions that a model writes within its reasoning, without ending it: Qwen3.5, GLM, Kimi."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from outrider.inputs.reasoning.stream import Splitter, Thought
from outrider.inputs.tools.loose import held_for
from outrider.inputs.tools.stream import ToolCallDelta, ToolCallStream, joined

_OPENS_QUOTE = re.compile(r"""(?:^|[\s(\[:])[`'"]\Z""")  # a marker after this is only mentioned


class CallsWithin:
    """Reasoning that a call ends which no end of the reasoning follows.

        stream = CallsWithin(THINK.stream(opened=True), HERMES.stream, ("<tool_call>",))
        stream.push('I read it.\\n<tool_call>\\n{"name": …')    # [Thought("I read it.")]
        stream.finish()                                       # ['<tool_call>\\n{"name": …']: the answer

    From the marker of a call on, thoughts are held back. They are thoughts if an answer follows them, or more than the
    call stands before the end of the reasoning, or the answer was cut, so that more might have followed. A marker
    that no call follows is a thought at once. Source: vLLM's and llama.cpp's parsers end the reasoning at the marker.
    """

    def __init__(self, stream: Splitter, calls: Callable[[], ToolCallStream], markers: Sequence[str]) -> None:
        self._stream, self._calls, self._markers = stream, calls, markers
        self._left = ""  # thoughts that may be the beginning of a marker, or of a call
        self._before = ""  # the two characters before them
        self._probe: ToolCallStream | None = None  # reads them from a marker on
        self._probed: list[str | ToolCallDelta] = []  # what it has found
        self._num_mentioned = 0  # characters of the marker and the blanks before it
        self.has_called = False  # once it is finished: whether the reasoning ended with a call

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._stream.is_reasoning

    @property
    def is_calling(self) -> bool:
        """Whether thoughts are held back that may be a call."""
        return self._probe is not None

    def push(self, text: str) -> list[Thought | str]:
        """Add text. Returns what is certain now."""
        return self._sorted(self._stream.push(text))

    def finish(self, *, is_cut: bool = False) -> list[Thought | str]:
        """Return what was held back, as no text follows. is_cut: the answer was, by its length."""
        pieces = self._sorted(self._stream.finish())
        if self._probe is not None and not is_cut:
            content, calls = joined([*self._probed, *self._probe.finish()])
            self.has_called = bool(calls) and (self._stream.is_reasoning or not content.strip())
        rest, self._left, self._probe = self._left, "", None
        if self.has_called:
            return [*pieces, rest.lstrip()]
        return [*pieces, *_thoughts(rest)]

    def _sorted(self, given: Sequence[Thought | str]) -> list[Thought | str]:
        pieces: list[Thought | str] = []
        for piece in given:
            if isinstance(piece, Thought):
                pieces += self._think(piece.text)
            else:  # the answer: what was held back was only considered
                pieces += [*_thoughts(self._left), piece]
                self._left, self._probe = "", None
        return pieces

    def _think(self, text: str) -> list[Thought | str]:
        self._left += text
        thoughts = ""
        while True:
            if self._probe is None:
                place, marker = self._next_marker()
                thoughts += self._taken(place)
                if not marker:
                    return _thoughts(thoughts)
                text = self._left.lstrip()
                self._probe, self._probed, self._num_mentioned = (
                    self._calls(),
                    [],
                    len(self._left) - len(text) + len(marker),
                )
            self._probed += self._probe.push(text)
            if not self._probed or isinstance(self._probed[0], ToolCallDelta):
                return _thoughts(thoughts)
            self._probe = None
            thoughts += self._taken(self._num_mentioned)

    def _next_marker(self) -> tuple[int, str]:
        """The place of the next marker with the blanks before it, and the marker; "" if it may still become one."""
        left, found = self._left, list[tuple[int, str]]()
        for marker in self._markers:
            place = left.find(marker)
            while place >= 0 and _OPENS_QUOTE.search((self._before + left[:place])[-2:]):
                place = left.find(marker, place + 1)
            found += [(place, marker)] if place >= 0 else []
        if found:
            place, marker = min(found)
            return len(left[:place].rstrip()), marker
        return len(left) - max(len(held_for(left, marker)) for marker in self._markers), ""

    def _taken(self, size: int) -> str:
        taken, self._left = self._left[:size], self._left[size:]
        self._before = (self._before + taken)[-2:]
        return taken


def _thoughts(text: str) -> list[Thought | str]:
    return [Thought(text)] if text else []
