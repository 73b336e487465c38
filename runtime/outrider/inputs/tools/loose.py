"""What calls begin with in a text that grows, also where models write something else than their format's marker.

Sources: llama.cpp's parser of Hermes 2 Pro; vLLM's parsers of Qwen3-Coder and of lists in Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.inputs.text.stream import num_held
from outrider.inputs.tools.arguments import Tags
from outrider.inputs.tools.heads import head_by_name
from outrider.inputs.tools.shapes import CALL_KEYS

if TYPE_CHECKING:
    from outrider.inputs.tools.formats import ToolFormat

FENCE, BRACKET = "```", "{"
_TAGS = (
    "tool_call", "tool_calls", "toolcall", "TOOL_CALL", "function_call", "function_calls", "tools", "tool", "response",
    "json", "JSON", "xml",
)  # fmt: skip
_IN_PIPES = {"<|tool_call|>": "<|/tool_call|>", "<|tool_call_start|>": "<|tool_call_end|>"}
# What stands before calls, and after them; empty: nothing that has to.
CLOSERS = {f"<{tag}>": f"</{tag}>" for tag in _TAGS} | _IN_PIPES | {FENCE: FENCE, "[TOOL_CALLS]": ""}
WORDS = ("tool_call", "tool_code", "json", "JSON", "xml", *CLOSERS)  # what may follow that, before the call
_AFTER_NAME = re.compile(r"(?:\.(?:c(?:a(?:ll?)?)?)?)?\s*(?:[({]|\Z)")  # Llama 3.1 writes f.call(a=1)
# A call in JSON without anything around it, and what may become one.
BARE = re.compile(rf"""\[?\s*\{{\s*["'](?:{"|".join(CALL_KEYS)})["']""")
PART_OF_BARE = re.compile(r"""\s*(?:\[\s*|(?:\[\s*)?\{\s*(?:["']\w*)?)\Z""")

EQUALS_TAGS = Tags(("<function=", ">"), ("<parameter=", ">"), ("\n", "\n</parameter>"), end="</function>", padded=True)
INVOKE_TAGS = Tags(('<invoke name="', '">'), ('<parameter name="', '">'), ("", "</parameter>"), end="</invoke>")
_NAME_TAGS = Tags(('<function name="', '">'), ('<parameter name="', '">'), ("", "</parameter>"), end="</function>")


@dataclass(frozen=True, slots=True)
class NamedTag:
    """A tag with a function's name, which JSON or tags of arguments follow. head: as `head_by_name` gives it."""

    head: tuple[re.Pattern[str], re.Pattern[str]]
    tags: Tags


# By what they begin with: Llama 3's and Qwen3-Coder's, Claude's and MiniMax's, and what small models make of them.
NAMED_TAGS = {
    tags.name[0]: NamedTag(head_by_name(*tags.name, BRACKET, tags.key[0], tags.end), tags)
    for tags in (EQUALS_TAGS, INVOKE_TAGS, _NAME_TAGS)
}


def begins_with(text: str, markers: Iterable[str]) -> str | None:
    """The marker that a text begins with; empty if it may become one; None: it does not."""
    found = next((marker for marker in markers if text.startswith(marker)), None)
    return "" if found is None and any(marker.startswith(text) for marker in markers) else found


def may_be_spelled(text: str, names: Iterable[str]) -> bool:
    """Whether a text may be the beginning of a call as `f {"a": 1}`, `f(a=1)` or `[f(a=1)]`."""
    text = _unprefixed(text.lstrip().removeprefix("[").lstrip())
    return any(
        name.startswith(text) or (text.startswith(name) and _AFTER_NAME.match(text[len(name) :])) for name in names
    )


def head_of_json(text: str, names: Iterable[str]) -> tuple[str, int] | None:
    """The name that stands before an object of arguments, and where the object begins."""
    before, bracket, _ = text.partition(BRACKET)
    name = _unprefixed(before.strip())
    return (name, len(before)) if bracket and name in names else None


def offered(name: str, names: Iterable[str]) -> str:
    """The function that a name means, where models put more around it; the name itself if there is none."""
    plain = _unprefixed(name.strip("\"' "))
    return plain if name not in names and plain in names else name


def _unprefixed(name: str) -> str:
    return name.removeprefix("functions.").removesuffix(".call")


class Openers:
    """Finds the marker of a call. loose: also those of other formats, and JSON that may be a call."""

    def __init__(self, form: ToolFormat, *, loose: bool) -> None:
        bare = form.begin.removesuffix(form.prefix)
        others = (*([bare] if form.prefix else []), *CLOSERS, *NAMED_TAGS) if loose else ()
        self._markers = (form.begin, *form.around, *others)
        self._is_loose = loose
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
            return marker, len(before), before[len(before.rstrip()) :]
        held = [held_for(text, marker) for marker in self._markers]
        if self._is_loose and (part := PART_OF_BARE.search(text)):
            held.append(part[0])
        return "", len(text), max(held, key=len)


def held_for(text: str, marker: str) -> str:
    """The end of a text that may belong to a marker: a beginning of it, and the blanks before."""
    return text[len(text[: len(text) - num_held(text, marker)].rstrip()) :]
