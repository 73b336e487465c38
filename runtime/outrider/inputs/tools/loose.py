"""What models write around calls in place of their format's marker.

Sources: llama.cpp's parser of Hermes 2 Pro; vLLM's parsers of Qwen3-Coder and of lists in Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from outrider.inputs.tools.arguments import Tags
from outrider.inputs.tools.heads import head_by_name
from outrider.inputs.tools.shapes import CALL_KEYS

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
