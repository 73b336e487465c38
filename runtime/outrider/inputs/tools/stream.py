"""Finds calls of functions in a text that grows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.inputs.tools.arguments import JsonArguments, TaggedArguments, num_held
from outrider.inputs.tools.shapes import ToolCall, calls_of, may_be_call

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from outrider.inputs.tools.formats import ToolFormat


_FENCES = ("```json", "```tool_call")  # of blocks of code in which small models write calls


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call `index`. name: in its first piece, None in the others. arguments: what was added to them."""

    index: int
    name: str | None
    arguments: str


class ToolCallStream:
    """Splits a text that grows into plain text and calls of functions.

        stream = ToolCallStream(form)
        pieces = stream.push("Let me see. <tool_ca")       # ["Let me see."]
        pieces += stream.push('ll>{"name": "f", …')        # [ToolCallDelta(0, "f", ""), …]
        pieces += stream.finish()

    However the text is cut, the pieces add up to the same. Blanks around calls are dropped. What only looks like the
    beginning of a call comes as text, at the latest with `finish`; a marker that nothing follows is dropped. What
    follows the last of max_calls is dropped. tools: whose schemas say what an argument is, where the format does not.
    loose: calls of these tools are also found in JSON without a marker, at the beginning or in a block of code.
    """

    def __init__(
        self,
        form: ToolFormat,
        max_calls: int | None = None,
        tools: Iterable[Mapping[str, Any]] = (),
        *,
        loose: bool = False,
    ) -> None:
        self._form = form
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._max_calls = max_calls
        self._left = ""  # text that no piece has yet
        self._opened = ""  # before it: the marker of a call that may turn out to be none, with the blanks before
        self._num_calls = 0
        self._is_behind_call = False  # nothing but blanks came since
        self._is_loose = loose and form.is_object and bool(self._schemas)
        self._is_marked = True  # whether a marker of the format stands before the call
        self._step = self._begin if form.bare or self._is_loose else self._text
        self._arguments: JsonArguments | TaggedArguments = JsonArguments()  # of the call that is being read

    def push(self, text: str) -> list[str | ToolCallDelta]:
        """Add text. Returns what is certain now."""
        self._left += text
        pieces: list[str | ToolCallDelta] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self, *, is_cut: bool = False) -> list[str | ToolCallDelta]:
        """Return what was held back, as no text follows.

        is_cut: the answer was, by its length, so what looks like the beginning of a call is one, and is dropped. It is
        dropped in any case where it is JSON.
        """
        is_text = self._step in (self._begin, self._text, self._head, self._object, self._whole)
        if not is_text or self._step == self._text or not self._is_marked:
            pass
        elif self._opened.strip() and (is_cut or self._form.is_object):  # a call that was cut before its arguments
            self._opened = self._left = ""
        rest, self._left, self._opened = self._opened + self._left, "", ""
        return [rest] if is_text and rest else []

    @property
    def is_over(self) -> bool:
        """Whether the last of max_calls is complete: nothing that follows counts."""
        return self._step == self._nothing

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun, and its arguments have not ended."""
        return self._step == self._values

    # Steps: each takes what it can from the text, adds pieces, and returns whether the next step can go on.

    def _begin(self, pieces: list[str | ToolCallDelta]) -> bool:  # noqa: ARG002
        """At the beginning of an answer that may be a call without a marker."""
        if not self._left.strip():
            return False
        if self._left.lstrip().startswith("{"):
            self._step, self._is_marked = self._head if self._form.bare else self._object, self._form.bare
        else:
            self._step = self._text
        return True

    def _text(self, pieces: list[str | ToolCallDelta]) -> bool:
        """Plain text, up to the marker of a call."""
        if self._is_behind_call:
            self._left = self._left.lstrip()
            self._is_behind_call = not self._left
        markers = (self._form.begin, *_FENCES) if self._is_loose else (self._form.begin,)
        found = [marker for marker in markers if marker in self._left]
        chosen = min(found, key=self._left.index, default=self._form.begin)
        before, marker, rest = self._left.partition(chosen)
        held = before[len(before.rstrip()) :] if marker else max((_held(before, each) for each in markers), key=len)
        if text := before[: len(before) - len(held)]:
            pieces.append(text)
        if not marker:
            self._left = held
            return False
        self._is_marked = marker == self._form.begin
        first = self._head if not self._form.whole else self._whole
        self._opened, self._left, self._step = held + marker, rest, first if self._is_marked else self._object
        return True

    def _head(self, pieces: list[str | ToolCallDelta]) -> bool:
        """A call up to its arguments."""
        found = self._form.head.match(self._left)
        if found is not None:
            name = json.loads(found[1], strict=False) if self._form.is_object else found[1]
            name = name.partition(self._form.numbered)[0] if self._form.numbered else name
            pieces.append(ToolCallDelta(self._num_calls, name, ""))
            self._opened, self._left = "", self._left[found.end() :]
            tags, schema = self._form.tags, self._schemas.get(name) or {}
            self._arguments = TaggedArguments(tags, schema) if tags else JsonArguments()
            self._step = self._values
            return True
        if self._form.part_of_head.fullmatch(self._left):
            return False
        if self._form.is_object and may_be_call(self._left):
            self._step = self._object
        else:
            self._be_text(pieces)
        return True

    def _be_text(self, pieces: list[str | ToolCallDelta]) -> None:
        """What looked like a call is none."""
        if self._opened:
            pieces.append(self._opened)
        self._opened, self._step, self._is_marked = "", self._text, True

    def _object(self, pieces: list[str | ToolCallDelta]) -> bool:
        """A call in another shape, or several in a list: read when it is complete."""
        text = self._left.lstrip()
        if not may_be_call(self._left) and text:
            self._be_text(pieces)
            return True
        value, rest = JsonArguments().take(text)
        if not text or (not rest and not _is_complete(text)):
            return False
        calls = calls_of(value)
        if not calls or (not self._is_marked and any(call.name not in self._schemas for call in calls)):
            self._be_text(pieces)
            return True
        self._left = rest
        return self._give(calls, pieces)

    def _whole(self, pieces: list[str | ToolCallDelta]) -> bool:
        """Calls in a syntax that is read up to its end."""
        text, end, rest = self._left.partition(self._form.end)
        if not end:
            return False
        calls = self._form.whole(text) if self._form.whole else []
        if not calls:
            self._be_text(pieces)
            return True
        self._left = end + rest
        return self._give(calls, pieces)

    def _give(self, calls: list[ToolCall], pieces: list[str | ToolCallDelta]) -> bool:
        """Add whole calls."""
        for call in calls:
            if self._num_calls == self._max_calls:
                break
            pieces += [
                ToolCallDelta(self._num_calls, call.name, ""),
                ToolCallDelta(self._num_calls, None, call.arguments),
            ]
            self._num_calls += 1
        self._opened, self._step = "", self._behind
        return True

    def _values(self, pieces: list[str | ToolCallDelta]) -> bool:
        """The arguments, up to their end."""
        new, self._left = self._arguments.take(self._left)
        if new:
            pieces.append(ToolCallDelta(self._num_calls, None, new))
        if not self._arguments.is_complete:
            return False
        self._num_calls += 1
        self._step = self._tail if self._form.is_object else self._behind
        return True

    def _nothing(self, pieces: list[str | ToolCallDelta]) -> bool:  # noqa: ARG002
        """Behind the last call that is wanted."""
        self._left = ""
        return False

    def _tail(self, pieces: list[str | ToolCallDelta]) -> bool:  # noqa: ARG002
        """What a call may have after its arguments, such as an id, up to the bracket that closes it."""
        _, bracket, self._left = self._left.partition("}")
        if bracket:
            self._step = self._behind
        return bool(bracket)

    @property
    def _again(self) -> str:
        """What another call in the same block begins with; empty if each has its marker."""
        form = self._form
        if form.tags is not None:
            return form.tags.name[0]
        return "{" if form.is_object and not form.separator else ""

    def _behind(self, pieces: list[str | ToolCallDelta]) -> bool:  # noqa: ARG002
        """The end of the calls, or what separates them."""
        form, left, is_last = self._form, self._left.lstrip(), self._num_calls == self._max_calls
        end, again = (form.end, self._again) if self._is_marked else ("```", "")
        if (not left or (end.startswith(left) and left != end)) and (end or not is_last):
            return False
        if is_last:
            self._step = self._nothing
        elif again and left.startswith(again):
            self._left, self._step = left, self._head
        elif again.startswith(left) and left:
            return False
        elif form.separator and left.startswith(form.separator):
            self._left, self._step = left[len(form.separator) :], self._head
        else:
            self._left, self._step = left.removeprefix(end), self._text
            self._is_behind_call = self._is_marked = True
        return True


def joined(pieces: Iterable[str | ToolCallDelta]) -> tuple[str, list[ToolCall]]:
    """The plain text and the calls that pieces add up to."""
    content, calls = "", list[ToolCall]()
    for piece in pieces:
        if isinstance(piece, str):
            content += piece
        elif piece.name is not None:
            calls.append(ToolCall(piece.name, piece.arguments))
        else:
            calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + piece.arguments)
    return content, calls


def _is_complete(text: str) -> bool:
    """Whether a text that begins with a bracket ends with the one that closes it."""
    reader = JsonArguments()
    reader.take(text)
    return reader.is_complete


def _held(text: str, marker: str) -> str:
    """The end of a text that may belong to a marker: a beginning of it, and the blanks before."""
    return text[len(text[: len(text) - num_held(text, marker)].rstrip()) :]
