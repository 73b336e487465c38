"""Finds calls of functions in a text that grows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outrider.inputs.tools.arguments import JsonArguments
from outrider.inputs.tools.bodies import OPEN, CallText, JsonBody, offered, read_object, read_spelled
from outrider.inputs.tools.loose import BRACKET, CLOSERS, FENCE, IN_WORDS, WORDS, Openers, begins_with
from outrider.inputs.tools.shapes import ToolCall, name_in
from outrider.inputs.tools.syntaxes import CallSyntax
from outrider.inputs.tools.tags import NAMED_TAGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from outrider.inputs.tools.formats import ToolFormat

_LONG = 1_000  # characters of a call, from which on it is only read again where it may have ended
_CLOSING = re.compile(r"[>)}\]{]")  # with what calls end, or arguments begin


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

    However the text is cut, the pieces add up to the same. Arguments that a model writes as JSON after the name come as
    they grow, others when their call is complete. Blanks around calls are dropped. What only looks like the beginning
    of a call comes as text, at the latest with `finish`; a marker that nothing follows is dropped. What follows the
    last of max_calls is dropped. tools: whose schemas say what an argument is, where the format does not.
    loose: calls of these tools are also found without a marker: in JSON, blocks of code and tags of other formats.
    once: a call that repeats an earlier one, as small models make them, is dropped.
    """

    def __init__(
        self,
        form: ToolFormat,
        max_calls: int | None = None,
        tools: Iterable[Mapping[str, Any]] = (),
        *,
        loose: bool = False,
        once: bool = False,
    ) -> None:
        self._form, self._once = form, once
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._max_calls = max_calls
        self._is_loose = loose and bool(self._schemas)
        self._openers = Openers(form, loose=self._is_loose)
        self._step = self._begin_answer if form.bare else self._read_text
        self._left = ""  # text that is not read yet
        self._pieces: list[str | ToolCallDelta] = []  # that are certain, and not given out yet
        self._opened = ""  # the marker before a call, with the blanks before that: text, if no call follows
        self._read: Callable[[str], CallText | None] = self._marked  # what follows it
        self._num_tried = 0  # characters of that, which are known not to end a call
        self._block = ""  # what stands around calls without the format's marker; empty: nothing
        self._name, self._written = "", ""  # of a call whose arguments are being read
        self._arguments = JsonArguments()
        self._in_object = False  # whether more of an object may follow them
        self._calls: list[ToolCall] = []  # that are complete
        self._has_repeated = False  # whether a call was dropped
        self._has_ended = False  # whether the marker after a call was read
        self.is_in_call = False  # whether a call has begun, and its arguments have not ended

    def push(self, text: str) -> list[str | ToolCallDelta]:
        """Add text. Returns what is certain now."""
        self._left += text
        while self._step():
            pass
        return self._taken()

    def _taken(self) -> list[str | ToolCallDelta]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self, *, is_cut: bool = False) -> list[str | ToolCallDelta]:
        """Return what was held back, as no text follows.

        is_cut: the answer was, by its length, so what looks like the beginning of a call is one, and is dropped. It is
        dropped in any case where it is JSON after a marker.
        """
        if self._step == self._read_call:
            self._end_in_call(is_cut)
        elif self._step == self._read_arguments and self._is_held:
            self._give([ToolCall(self._name, self._written)])
        elif self._step in (self._begin_answer, self._read_text) and self._left:
            self._pieces.append(self._left)
        self._step = self._drop
        return self._taken()

    def _end_in_call(self, is_cut: bool) -> None:
        """What looks like the beginning of a call is at the end of the answer."""
        form, is_marked, found = self._form, self._read == self._marked, self._read(self._left)
        self.is_in_call = found is not None and bool(found.calls)
        if is_marked and isinstance(form.body, CallSyntax) and not is_cut:
            found = self._read(self._left + form.end)  # only the marker after it is missing
        if found is not None and found.calls:
            self._give(found.calls)
            return
        is_marked = is_marked and bool(self._opened.strip())
        is_offered = self._is_loose and name_in(self._left) in self._schemas
        if not (is_marked and (is_cut or form.is_object)) and not (is_offered and is_cut):
            self._pieces.append(self._opened + self._left)

    @property
    def is_over(self) -> bool:
        """Whether the last of max_calls is complete, or one was repeated: nothing that follows counts."""
        return self._step == self._drop or self._has_repeated

    # Steps: each takes what it can from the text, adds pieces, and returns whether the next step can go on.

    def _begin_answer(self) -> bool:
        """The beginning of an answer that may be a call without a marker."""
        left = self._left.strip()
        if not left or (self._is_loose and left == "["):
            return False
        if left.startswith(BRACKET):
            self._begin_call(self._marked)
        elif self._is_loose and left.startswith("[") and read_spelled(left, self._schemas):
            self._begin_call(self._unmarked)
        else:
            self._step = self._read_text
        return True

    def _begin_call(self, read: Callable[[str], CallText | None], opened: str = "") -> None:
        self._read, self._opened, self._step, self._num_tried = read, opened, self._read_call, 0

    def _read_text(self) -> bool:
        """Plain text, up to the marker of a call."""
        marker, place, held = self._openers.find(self._left)
        if before := self._left[: place - len(held)]:
            self._pieces.append(before)
            self._block = ""
        if not marker:
            self._left = held
            return False
        is_marked = marker == self._form.begin
        is_read_again = not is_marked and (marker == BRACKET or marker in NAMED_TAGS)  # with what follows
        opened = held if is_read_again else held + marker
        self._left = self._left[place if is_read_again else place + len(marker) :]
        if marker in self._form.around:
            self._step, self._has_ended = self._end_call, True
        else:
            self._begin_call(self._marked if is_marked else self._unmarked, opened)
        return True

    def _read_call(self) -> bool:
        """What follows a marker: a call, or text after all."""
        num_tried, self._num_tried = self._num_tried, len(self._left)
        if num_tried > _LONG and not _CLOSING.search(self._left, num_tried):
            return False
        found = self._read(self._left)
        if found is None:
            self._be_text()
            return True
        if found.state == "open":
            return False
        self._left, self._opened = self._left[found.size :], ""
        if found.state == "whole":
            self._step = self._end_call
            self._give(found.calls)
        else:
            self._name, self._written, self._arguments = found.calls[0].name, "", JsonArguments()
            self._in_object, self.is_in_call, self._step = found.state == "object", True, self._read_arguments
            self._add(self._name, "")
        return True

    @property
    def _is_held(self) -> bool:
        """Whether a call is given out when it is complete, as it may repeat an earlier one."""
        return self._once and bool(self._calls)

    def _add(self, name: str | None, arguments: str) -> None:
        """Give out a piece of the call that is read."""
        if not self._is_held:
            self._pieces.append(ToolCallDelta(len(self._calls), name, arguments))

    def _be_text(self) -> None:
        """What looked like a call is none. Its first part is text, so that it is not found again."""
        first = self._opened
        if not first.strip():
            size = len(self._left) - len(self._left.lstrip()) + 1
            first, self._left = first + self._left[:size], self._left[size:]
        self._pieces.append(first)
        self._opened = self._block = ""
        self._step = self._read_text

    def _give(self, calls: Sequence[ToolCall]) -> None:
        """Add whole calls."""
        self._has_ended = False
        for call in calls[: None if self._max_calls is None else self._max_calls - len(self._calls)]:
            if self._once and call in self._calls:
                self._has_repeated = True
                continue
            arguments = [ToolCallDelta(len(self._calls), None, call.arguments)] if call.arguments else []
            self._pieces += [ToolCallDelta(len(self._calls), call.name, ""), *arguments]
            self._calls.append(call)

    def _read_arguments(self) -> bool:
        """Arguments in JSON, up to their end."""
        new, self._left = self._arguments.take(self._left)
        self._written += new
        if new:
            self._add(None, new)
        if not self._arguments.is_complete:
            return False
        self.is_in_call = self._has_ended = False
        self._step = self._end_object if self._in_object else self._end_call
        call = ToolCall(self._name, self._written)
        if self._is_held:
            self._give([call])
        else:
            self._calls.append(call)
        return True

    def _end_object(self) -> bool:
        """What a call may have after its arguments, such as an id, up to the bracket that closes it, or the end."""
        before, bracket, rest = self._left.partition("}")
        if len(self._form.end) > 1 and self._form.end in before:  # the bracket is missing
            rest = self._left[before.index(self._form.end) :]
        elif not bracket:
            return False
        self._left, self._step = rest, self._end_call
        return True

    def _end_call(self) -> bool:
        """What may stand between a call and another call, or text."""
        form, left, is_last = self._form, self._left.lstrip(), len(self._calls) == self._max_calls
        if form.is_object and not self._has_ended:
            left = left.lstrip("}" if form.separator else "},").lstrip()  # small models write one too many
        ends = [form.end] if form.end and (self._is_loose or not self._has_ended) else []
        if self._is_loose:
            ends += [*CLOSERS, *([FENCE] if FENCE in self._block else [])]
        tag = "" if self._has_ended else form.body.end
        ends += [tag] if tag else []
        again = form.body.next_begin if self._read == self._marked and not (form.separator or self._has_ended) else ""
        end = begins_with(left, ends)
        if (end == "" or (not left and ends)) or (not left and not is_last):
            return False
        if is_last:
            self._step = self._drop
        elif end:
            self._left, self._has_ended = left[len(end) :], end != tag
            if end == FENCE:
                self._block = ""
        elif again and left.startswith(again):
            self._left = left
            self._begin_call(self._marked)
        elif again.startswith(left):
            return False
        elif form.separator and not self._has_ended and left.startswith(form.separator):
            self._left = left[len(form.separator) :]
            self._begin_call(self._marked)
        elif self._block and read_spelled(left, self._schemas):
            self._left = left
            self._begin_call(self._unmarked)
        else:
            self._left, self._step = left, self._read_text
        return True

    def _drop(self) -> bool:
        """Drop what follows the last call that is wanted."""
        self._left = ""
        return False

    # Calls: what a text that grows is, after a marker or what stands for one.

    def _marked(self, text: str) -> CallText | None:
        """What follows the format's marker: a call in the format or, as small models write them, in another one."""
        form = self._form
        found = self._named(form.body.read(text, form.opener, form.end, self._schemas))
        if found is None and not isinstance(form.body, JsonBody | CallSyntax):
            found = self._named(read_object(text))
        if found is None and self._is_loose:
            found = self._in_tags(text) or self._named(read_spelled(text, self._schemas))
        return found

    def _unmarked(self, text: str) -> CallText | None:
        """A call of one of the tools after another marker, in a block of code, or without anything before it."""
        words = IN_WORDS.match(text)
        size = words.end() if words else 0
        rest = text[size:].lstrip()
        if begins_with(rest, (*NAMED_TAGS, *WORDS)) == "":
            return OPEN
        opened = (self._opened + text[:size]).strip()
        found = self._in_tags(rest)
        if self._form.prefix and opened == self._form.bare_begin:
            found = self._form.body.read(rest, "", self._form.end, self._schemas)
        if found is None and opened != FENCE:  # whose language is not known
            found = read_spelled(rest, self._schemas)
        if found is None:
            found = read_object(rest, needs_arguments=opened in ("", FENCE))
        found = self._known(self._named(found))
        if found is None or found.state == "open":
            return found
        self._block += opened
        return replace(found, size=found.size + len(text) - len(rest))

    def _in_tags(self, text: str) -> CallText | None:
        """A call in tags that have its name."""
        tag = begins_with(text.lstrip(), NAMED_TAGS)
        if not tag:
            return None if tag is None else OPEN
        return self._known(self._named(NAMED_TAGS[tag].read_unmarked(text, self._schemas)))

    def _named(self, found: CallText | None) -> CallText | None:
        """The same with the names of the tools, where the model puts more around them."""
        if not self._is_loose or found is None:
            return found
        calls = (replace(call, name=offered(call.name, self._schemas)) for call in found.calls)
        return replace(found, calls=tuple(calls))

    def _known(self, found: CallText | None) -> CallText | None:
        """None for calls of other functions."""
        return found if found and all(call.name in self._schemas for call in found.calls) else None


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
