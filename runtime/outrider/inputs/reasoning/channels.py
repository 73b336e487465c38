"""gpt-oss' channels (OpenAI's harmony format): messages with a header, of which one kind is reasoning."""

from __future__ import annotations

import re

from outrider.inputs.reasoning.stream import Splitter, Thought
from outrider.inputs.text.stream import num_held

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
MARKERS = (_MESSAGE, *_ENDS, "<|constrain|>")
CALL = "<|channel|>commentary to=functions."  # how calls are passed on, whatever the order in their header
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<>]+)")


class Channels(Splitter):
    """Splits messages: "analysis" is reasoning, "final" and comments are text. Calls are passed on as text.

    Source: openai/harmony, docs/format.md. opened: the prompt has ended within an analysis.
    """

    def __init__(self, *, opened: bool = False) -> None:
        super().__init__()
        self._kind = "analysis" if opened else "header"  # of the message that is read
        self._has_begun = opened

    @property
    def is_reasoning(self) -> bool:
        """Whether an analysis is read, or its header."""
        return self._kind == "analysis" or (self._kind == "header" and "analysis" in self._left)

    def finish(self, *, is_cut: bool = False) -> list[Thought | str]:  # noqa: ARG002
        """Return what was held back, as no text follows. A header alone is no text."""
        rest, pieces = self._left, list[Thought | str]()
        if self._kind == "analysis" and rest.strip():
            pieces.append(Thought(rest.rstrip()))
        elif self._kind != "header" and rest:
            pieces.append(self._located(rest))
        self._left = ""
        return pieces

    def _advance(self, pieces: list[Thought | str]) -> bool:
        return self._header(pieces) if self._kind == "header" else self._body(pieces)

    def _header(self, pieces: list[Thought | str]) -> bool:
        text = self._left.lstrip()
        if not self._has_begun and text and not text.startswith("<|"[: len(text)]) and not text.startswith("to="):
            self._kind = self._begin("final")  # no message at all
            return True
        head, marker, rest = self._left.partition(_MESSAGE)
        if not marker:
            return False
        self._left = rest
        if recipient := _RECIPIENT.search(head):
            pieces.append(f"{CALL}{recipient[1]}{_MESSAGE}")
            self._kind = self._begin("call")
        else:
            found = _CHANNEL.search(head)
            self._kind = self._begin("analysis" if found and found[1] == "analysis" else "final")
        return True

    def _begin(self, kind: str) -> str:
        self._has_begun = True
        return kind

    def _body(self, pieces: list[Thought | str]) -> bool:
        found = _END.search(self._left)
        count = 0 if found else max(num_held(self._left, end) for end in _ENDS)
        text = self._left[: found.start() if found else len(self._left) - count]
        if self._kind == "analysis":
            text = text.rstrip()
        if text:
            pieces.append(Thought(text) if self._kind == "analysis" else self._located(text))
        if found is None:
            self._left = self._left[len(text) :]
            return False
        if self._kind == "call":
            pieces.append("<|call|>")
        is_head = found[0] in ("<|start|>", "<|channel|>")
        self._left, self._kind = self._left[found.start() if is_head else found.end() :], "header"
        return True
