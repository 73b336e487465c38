"""What calls begin with in a text that grows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from outrider.inputs.text.stream import num_held
from outrider.inputs.tools.loose import BARE, BRACKET, CLOSERS, NAMED_TAGS, PART_OF_BARE

if TYPE_CHECKING:
    from outrider.inputs.tools.formats import ToolFormat


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
