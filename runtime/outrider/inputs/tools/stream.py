"""Finds calls of functions in a text that grows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.inputs.tools.arguments import JsonArguments, TaggedArguments, Tags
from outrider.inputs.tools.loose import (
    BRACKET,
    CLOSERS,
    FENCE,
    NAMED_TAGS,
    WORDS,
    Openers,
    begins_with,
    head_of_json,
    may_be_spelled,
    offered,
)
from outrider.inputs.tools.shapes import ToolCall, calls_of, is_call, may_be_call, name_in, python_calls

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from outrider.inputs.tools.formats import ToolFormat


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call `index`. name: in its first piece, None in the others. arguments: what was added to them."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class _Reading:
    """A call that is being read."""

    opened: str = ""  # the marker before it, with the blanks before that: text, if it turns out to be no call
    named: str = ""  # what it began with, if that is one of NAMED_TAGS
    arguments: JsonArguments | TaggedArguments = field(default_factory=JsonArguments)
    text: str = ""  # of a call that is read as a whole, so far
    value: str = ""  # the JSON in it


class ToolCallStream:
    """Splits a text that grows into plain text and calls of functions.

        stream = ToolCallStream(form)
        pieces = stream.push("Let me see. <tool_ca")       # ["Let me see."]
        pieces += stream.push('ll>{"name": "f", …')        # [ToolCallDelta(0, "f", ""), …]
        pieces += stream.finish()

    However the text is cut, the pieces add up to the same. Blanks around calls are dropped. What only looks like the
    beginning of a call comes as text, at the latest with `finish`; a marker that nothing follows is dropped. What
    follows the last of max_calls is dropped. tools: whose schemas say what an argument is, where the format does not.
    loose: calls of these tools are also found without a marker: in JSON, blocks of code and tags of other formats.
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
        self._is_loose = loose and bool(self._schemas)
        self._openers = Openers(form, loose=self._is_loose)
        self._step = self._read_first if form.bare else self._read_text
        self._left = ""  # text that is not read yet
        self._pieces: list[str | ToolCallDelta] = []  # that are certain, and not given out yet
        self._call = _Reading()
        self._num_calls = 0
        self._is_marked = True  # whether a marker of the format stands before the call
        self._closers = list[str]()  # of what stands around calls without one
        self._is_after_call = False  # nothing but blanks came since

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
        call = self._call
        if self._step == self._read_syntax and not is_cut and (calls := self._calls_of(self._left)):
            self._give(calls)  # only the marker after it is missing
        elif self._step not in (self._read_arguments, self._read_tail, self._read_end, self._drop):
            is_marked = self._step != self._read_text and self._is_marked and bool(call.opened.strip())
            is_loose = self._step == self._read_object and self._is_loose and name_in(call.text) in self._schemas
            rest = call.opened + call.text + self._left
            if rest and not (is_marked and (is_cut or self._form.is_object)) and not (is_loose and is_cut):
                self._pieces.append(rest)
        self._left, self._call = "", _Reading()
        return self._taken()

    @property
    def is_over(self) -> bool:
        """Whether the last of max_calls is complete: nothing that follows counts."""
        return self._step == self._drop

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun, and its arguments have not ended."""
        return self._step == self._read_arguments

    # Steps: each takes what it can from the text, adds pieces, and returns whether the next step can go on.

    def _read_first(self) -> bool:
        """At the beginning of an answer that may be a call without a marker."""
        left = self._left.strip()
        if not left or (self._is_loose and left == "["):
            return False
        is_list = self._is_loose and left.startswith("[") and may_be_spelled(left, self._schemas)
        self._step = self._read_head if left.startswith(BRACKET) else self._read_spelled if is_list else self._read_text
        self._is_marked = not is_list
        return True

    def _read_text(self) -> bool:
        """Plain text, up to the marker of a call."""
        if self._is_after_call:
            self._left = self._left.lstrip()
            closer = begins_with(self._left, [self._form.end]) if self._form.end and self._is_loose else None
            if closer:  # one too many
                self._left = self._left[len(closer) :]
                return True
            self._is_after_call = not self._left or closer == ""
            if closer == "":
                return False
        marker, place, held = self._openers.find(self._left)
        if before := self._left[: place - len(held)]:
            self._pieces.append(before)
            self._closers.clear()
        if not marker:
            self._left = held
            return False
        self._is_marked = marker == self._form.begin
        self._call.named = marker if marker in NAMED_TAGS and not self._is_marked else ""
        is_read_again = marker == BRACKET or bool(self._call.named)  # with what follows
        self._call.opened = held if is_read_again else held + marker
        self._left = self._left[place if is_read_again else place + len(marker) :]
        if marker in self._form.around:
            self._call.opened, self._is_after_call, self._is_marked = "", True, True
        elif self._is_marked:
            self._step = self._read_syntax if self._form.syntax else self._read_head
        elif is_read_again or marker not in CLOSERS:
            self._step = self._read_object if marker == BRACKET else self._read_head
        else:
            self._close_with(CLOSERS[marker])
            self._step = self._read_opening
        return True

    def _close_with(self, closer: str) -> None:
        """Expect a closer after the calls."""
        self._closers += [closer] if closer else []

    def _read_opening(self) -> bool:
        """What stands before a call in a block of code, or in tags of other formats."""
        left = self._left.lstrip()
        word = begins_with(left, (*NAMED_TAGS, *WORDS))
        if word == "":
            return False
        if word is None:
            is_code = self._call.opened.strip() == FENCE  # whose language is not known
            self._step = (
                self._read_spelled if not is_code and may_be_spelled(left, self._schemas) else self._read_object
            )
        elif word in NAMED_TAGS:
            self._call.named, self._step = word, self._read_head
        else:
            self._call.opened += self._left[: len(self._left) - len(left) + len(word)]
            self._left = left[len(word) :]
            self._close_with(CLOSERS.get(word, ""))
        return True

    def _read_head(self) -> bool:
        """A call up to its arguments."""
        form, named = self._form, NAMED_TAGS.get(self._call.named)
        whole, part = named.head if named else (form.head, form.part_of_head)
        found = whole.match(self._left)
        if found is None and part.fullmatch(self._left):
            return False
        if found is None:
            return self._read_other_head()
        name = json.loads(found[1], strict=False) if form.is_object and not named else found[1]
        if form.numbered:
            name = name.partition(form.numbered)[0].removeprefix(form.prefix)
        if self._is_loose:
            name = offered(name, self._schemas)
        if not self._is_marked and name not in self._schemas:
            self._be_text()
            return True
        tags = named.tags if named else form.tags
        self._left = self._left[found.end() :]
        if named and self._left.startswith(BRACKET):
            self._close_with(named.tags.end)
            tags = None
        elif not self._is_marked and not named:
            self._close_with(form.end)
        self._begin_call(name, tags)
        return True

    def _begin_call(self, name: str, tags: Tags | None) -> None:
        """A call whose arguments follow, between tags or in JSON."""
        self._pieces.append(ToolCallDelta(self._num_calls, name, ""))
        arguments = TaggedArguments(tags, self._schemas.get(name) or {}) if tags else JsonArguments()
        self._call = _Reading(arguments=arguments)
        self._step = self._read_arguments

    def _read_other_head(self) -> bool:
        """What the format does not have after its marker: a call in another shape, or text."""
        left = self._left.lstrip()
        tag = begins_with(left, NAMED_TAGS) if self._is_marked and self._is_loose and not self._call.named else None
        if tag == "":
            return False
        if tag:
            self._call.named, self._is_marked = tag, False
            self._close_with(self._form.end)
        elif self._is_marked and may_be_call(self._left):
            self._step = self._read_object
        elif self._is_marked and self._is_loose and may_be_spelled(self._left, self._schemas):
            self._step = self._read_spelled
        else:
            self._be_text()
        return True

    def _read_spelled(self) -> bool:
        """A call whose name stands before its arguments: an object, or as Python writes them."""
        if not self._call.text:
            if found := head_of_json(self._left, self._schemas):
                name, size = found
                self._left = self._left[size:]
                self._begin_call(name, None)
                return True
            if not may_be_spelled(self._left, self._schemas):
                self._be_text()
                return True
            if "(" not in self._left:
                return False
            self._call.arguments = JsonArguments(of_python=True)
        return self._take_value() and self._give_if_offered(python_calls(self._call.value))

    def _take_value(self) -> bool:
        """Read on in a call that is read as a whole. Returns whether it is complete."""
        call, before = self._call, self._left
        value, self._left = call.arguments.take(before if call.text else before.lstrip())
        call.text += before[: len(before) - len(self._left)]
        call.value += value
        return call.arguments.is_complete

    def _give_if_offered(self, calls: list[ToolCall]) -> bool:
        """Add whole calls, or text where there are none, or of other functions without the format's marker."""
        if self._is_loose:
            calls = [ToolCall(offered(call.name, self._schemas), call.arguments) for call in calls]
        if not calls or (not self._is_marked and any(call.name not in self._schemas for call in calls)):
            self._be_text()
            return True
        return self._give(calls)

    def _be_text(self) -> None:
        """What looked like a call is none. Its first part is text, so that it is not found again."""
        self._left = self._call.text + self._left
        first = self._call.opened
        if not first.strip():
            size = len(self._left) - len(self._left.lstrip()) + 1
            first, self._left = first + self._left[:size], self._left[size:]
        self._pieces.append(first)
        self._call = _Reading()
        self._step, self._is_marked = self._read_text, True

    def _read_object(self) -> bool:
        """A call in another shape, or several in a list: read when it is complete."""
        if not self._call.text:
            text = self._left.lstrip()
            if text and not may_be_call(text):
                self._be_text()
                return True
            if not is_call(text):  # it may become one
                return False
            self._call.arguments = JsonArguments()
        if not self._take_value():
            return False
        is_next = self._is_marked and self._num_calls > 0  # in the block of another
        calls = calls_of(self._call.value, needs_arguments=not is_next and self._call.opened.strip() in ("", FENCE))
        return self._give_if_offered(calls)

    def _read_syntax(self) -> bool:
        """Calls in a syntax that is read up to its end."""
        text, end, rest = self._left.partition(self._form.end)
        if not end:
            return False
        calls = self._calls_of(text)
        if not calls:
            self._be_text()
            return True
        self._left = end + rest
        return self._give(calls)

    def _calls_of(self, text: str) -> list[ToolCall]:
        """The calls that a text between the format's markers is."""
        return (self._form.syntax.read(text) if self._form.syntax else []) or calls_of(text)

    def _give(self, calls: list[ToolCall]) -> bool:
        """Add whole calls."""
        for call in calls:
            if self._num_calls == self._max_calls:
                break
            self._pieces += [
                ToolCallDelta(self._num_calls, call.name, ""),
                ToolCallDelta(self._num_calls, None, call.arguments),
            ]
            self._num_calls += 1
        self._call, self._step = _Reading(), self._read_end
        return True

    def _read_arguments(self) -> bool:
        """The arguments, up to their end."""
        new, self._left = self._call.arguments.take(self._left)
        if new:
            self._pieces.append(ToolCallDelta(self._num_calls, None, new))
        if not self._call.arguments.is_complete:
            return False
        self._num_calls += 1
        self._step = self._read_tail if self._form.is_object and self._is_marked else self._read_end
        return True

    def _drop(self) -> bool:
        """Drop what follows the last call that is wanted."""
        self._left = ""
        return False

    def _read_tail(self) -> bool:
        """What a call may have after its arguments, such as an id, up to the bracket that closes it, or the end."""
        before, bracket, rest = self._left.partition("}")
        if len(self._form.end) > 1 and self._form.end in before:  # the bracket is missing
            rest = self._left[before.index(self._form.end) :]
        elif not bracket:
            return False
        self._left, self._step = rest, self._read_end
        return True

    def _read_end(self) -> bool:
        """The end of the calls, or what separates them."""
        form, left, is_last = self._form, self._left.lstrip(), self._num_calls == self._max_calls
        if form.is_object:
            left = left.lstrip("}" if form.separator else "},").lstrip()  # small models write one too many
        ends, again = ([form.end], form.next_begin) if self._is_marked else (self._closers, "")
        is_open = not left or any(end.startswith(left) and end != left for end in ends)
        if is_open and (any(ends) or not is_last):
            return False
        end = next((end for end in ends if end and left.startswith(end)), "")
        if is_last:
            self._step = self._drop
        elif again and left.startswith(again):
            self._left, self._step = left, self._read_head
        elif again.startswith(left) and left:
            return False
        elif form.separator and left.startswith(form.separator):
            self._left, self._step = left[len(form.separator) :], self._read_head
        elif self._closers and not end and not self._is_marked and may_be_spelled(left, self._schemas):
            self._left, self._step = left, self._read_spelled
        elif end and not self._is_marked:  # there may be others
            self._left = left[len(end) :]
            self._closers.remove(end)
        else:
            self._left, self._step = left.removeprefix(end), self._read_text
            self._is_after_call = self._is_marked = True
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
