"""What calls begin with in a text that grows, also where models write something else than their format's marker.

Sources: llama.cpp's parser of Hermes 2 Pro; vLLM's parsers of Qwen3-Coder and of lists in Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from outrider.inputs.text.stream import num_held
from outrider.inputs.tools.shapes import CALL_KEYS
from outrider.inputs.tools.tags import NAMED_TAGS

if TYPE_CHECKING:
    from outrider.inputs.tools.formats import ToolFormat

FENCE, BRACKET = "```", "{"
_TAGS = (
    "tool_call", "tool_calls", "toolcall", "TOOL_CALL", "function_call", "function_calls", "tools", "tool", "response",
    "json", "JSON", "xml",
)  # fmt: skip
# What stands before calls without the format's marker, and what may stand after them.
_OPENERS = (*(f"<{tag}>" for tag in _TAGS), "<|tool_call|>", "<|tool_call_start|>", FENCE, "[TOOL_CALLS]")
CLOSERS = (*(f"</{tag}>" for tag in _TAGS), "<|/tool_call|>", "<|tool_call_end|>", "</function>", "</invoke>")
WORDS = ("tool_call", "tool_code", "json", "JSON", "xml", *_OPENERS)  # what may follow an opener, before the call
IN_WORDS = re.compile(rf"(?:\s*(?:{'|'.join(map(re.escape, WORDS))}))*")
# A call in JSON without anything around it, and what may become one.
BARE = re.compile(rf"""\[?\s*\{{\s*["'](?:{"|".join(CALL_KEYS)})["']""")
PART_OF_BARE = re.compile(r"""\s*(?:\[\s*|(?:\[\s*)?\{\s*(?:["']\w*)?)\Z""")


def begins_with(text: str, markers: Iterable[str]) -> str | None:
    """The marker that a text begins with; empty if it may become one; None: it does not."""
    found = next((marker for marker in markers if text.startswith(marker)), None)
    return "" if found is None and any(marker.startswith(text) for marker in markers) else found


class Openers:
    """Finds the marker of a call. loose: also those of other formats, and JSON that may be a call."""

    def __init__(self, form: ToolFormat, *, loose: bool) -> None:
        others = (form.bare_begin, *_OPENERS, *NAMED_TAGS) if loose else ()
        self._markers = (form.begin, *form.around, *others)
        self._begin, self._is_loose = form.begin, loose
        firsts = {marker[0] for marker in self._markers} | ({"[", BRACKET} if loose else set())
        self._first = re.compile(f"[{re.escape(''.join(firsts))}]")  # what all of them begin with

    def find(self, text: str) -> tuple[str, int, str]:
        """The next marker, its place, and the blanks before it; if there is none, the end that may become all this.

        Of a call in JSON without a marker, the bracket is the marker.
        """
        if not self._first.search(text):
            return "", len(text), text[len(text.rstrip()) :]
        found = {marker: place for marker in self._markers if (place := text.find(marker)) >= 0}
        if self._is_loose and (bare := BARE.search(text)):
            found[BRACKET] = bare.start()
        if found:
            marker = min(found, key=lambda each: (found[each], -len(each)))
            before = text[: found[marker]]
            if marker != self._begin and self._begin.startswith(text[len(before) :]):
                return "", len(text), text[len(before.rstrip()) :]  # it may become the longer one
            return marker, len(before), before[len(before.rstrip()) :]
        held = [held_for(text, marker) for marker in self._markers]
        if self._is_loose and (part := PART_OF_BARE.search(text)):
            held.append(part[0])
        return "", len(text), max(held, key=len)


def held_for(text: str, marker: str) -> str:
    """The end of a text that may belong to a marker: a beginning of it, and the blanks before."""
    return text[len(text[: len(text) - num_held(text, marker)].rstrip()) :]
