"""JSON as models write it: where a value ends in a text, and what of it has to be mended."""

from __future__ import annotations

import json
import re

_ESCAPED = '"\\/bfnrtu'  # what a backslash may stand before in JSON
_NONE = {"o": "u", "n": "l", "e": "l"}  # null for None, after its first letter
_PIECES = re.compile(r""""(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+'|["'()\[\]{}]""", re.DOTALL)


def end_of_value(text: str) -> int | None:
    """Where the bracket stands that closes a text's first one; None: not in this text. Brackets in strings are none."""
    depth = 0
    for found in _PIECES.finditer(text):
        if found[0] in "\"'":  # a string that goes on
            return None
        depth += (found[0] in "{[(") - (found[0] in "}])")
        if found[0] in "}])" and not depth:
            return found.end()
    return None


class JsonArguments:
    """Reads a JSON object in a text that grows, up to the bracket that closes it. is_complete: whether it has ended.

    What small models write is made JSON: a comma before a bracket is left out, control characters within strings are
    escaped, and so is a backslash that escapes nothing. Python's strings, True, False and None become JSON's.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._comma = ""  # one that may be the last, with the blanks after it
        self._depth = 0  # of brackets
        self._quote = ""  # of the string that is open
        self._is_escaped = self._is_none = False

    def take(self, text: str) -> tuple[str, str]:
        """Read what comes next. Returns what it adds to the JSON, and the text that is still to be read."""
        made = list[str]()
        for i, character in enumerate(text):
            is_outside = not self._quote and character not in "\"'"
            if is_outside and (character == "," or (self._comma and character.isspace())):
                made.append(self._comma if character == "," else "")
                self._comma = "," if character == "," else self._comma + character
                continue
            made.append(self._comma[1:] if is_outside and character in "}]" else self._comma)
            self._comma = ""
            made.append(self._outside(character) if is_outside else self._within(character))
            if is_outside and character in "}])" and not self._depth:
                self.is_complete = True
                return "".join(made), text[i + 1 :]
        return "".join(made), ""

    def _within(self, character: str) -> str:
        """What a character of a string is in JSON."""
        if not self._quote:
            self._quote = character
            return '"'
        if self._is_escaped:
            self._is_escaped = False
            if character in _ESCAPED:
                return f"\\{character}"
            return "'" if character == self._quote else f"\\\\{_escaped(character) if character < ' ' else character}"
        if character == "\\":
            self._is_escaped = True  # it comes with what it escapes
            return ""
        if character == self._quote:
            self._quote = ""
            return '"'
        return _escaped(character) if character < " " or character == '"' else character

    def _outside(self, character: str) -> str:
        """What a character outside of strings is in JSON: true for True, null for None."""
        self._depth += (character in "{[(") - (character in "}])")
        if self._is_none and character in _NONE:
            return _NONE[character]
        self._is_none = character == "N"
        return character.lower() if character in "TFN" else character


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
