"""Arguments of a call in a text that grows: as JSON, whatever the format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outrider.inputs.text.stream import num_held
from outrider.inputs.tools.values import as_json, table_of, types_of

_ESCAPED = '"\\/bfnrtu'  # what a backslash may stand before in JSON
_NONE = {"o": "u", "n": "l", "e": "l"}  # null for None, after its first letter


class JsonArguments:
    """Reads a JSON object, up to the bracket that closes it. is_complete: whether it has ended.

    What small models write is made JSON: a comma before a bracket is left out, control characters within strings are
    escaped, and so is a backslash that escapes nothing. Python's strings, True, False and None become JSON's.

    of_python: reads a call as Python writes it, f(a='b'), or a list of them, of which the strings become JSON's.
    """

    def __init__(self, *, of_python: bool = False) -> None:
        self._of_python = of_python
        self.is_complete = False
        self._comma = ""  # one that may be the last, with the blanks after it
        self._depth = 0  # of brackets
        self._quote = ""  # of the string that is open
        self._is_escaped = self._is_none = False

    def take(self, text: str) -> tuple[str, str]:
        """Read what comes next. Returns what it adds to the JSON, and the text that is still to be read."""
        end = self._end(text)
        written = self._written if self._is_odd else text[:end]
        return self._without_last_commas(written) if "," in text or self._comma else "".join(written), text[end:]

    def _without_last_commas(self, text: Iterable[str]) -> str:
        """A part of the JSON, to which what was held back is added. `_end` has read it already."""
        added = ""
        for character, is_outside in zip(text, self._outside, strict=True):
            if is_outside and (character == "," or (self._comma and character.isspace())):
                added += self._comma if character == "," else ""
                self._comma = "," if character == "," else self._comma + character
                continue
            added += (self._comma[1:] if is_outside and character in "}]" else self._comma) + character
            self._comma = ""
        return added

    def _end(self, text: str) -> int:
        self._outside = list[bool]()  # of each character read: whether it is outside of strings
        self._written, self._is_odd = list[str](), False  # of each: what it is in JSON, and whether some are not that
        for i, character in enumerate(text):
            self._outside.append(not self._quote and character not in "\"'")
            if self._quote:
                written = self._within(character)
            elif character in "\"'":
                self._quote, written = character, '"'
            else:
                written = character if self._of_python else self._of_literal(character)
                self._depth += (character in "{[(") - (character in "}])")
            self._written.append(written)
            self._is_odd = self._is_odd or written != character
            if self._outside[-1] and character in "}])" and not self._depth:
                self.is_complete = True
                return i + 1
        return len(text)

    def _within(self, character: str) -> str:
        """What a character of a string is in JSON."""
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

    def _of_literal(self, character: str) -> str:
        """What a character outside of strings is in JSON: true for True, null for None."""
        if self._is_none and character in _NONE:
            return _NONE[character]
        self._is_none = character == "N"
        return character.lower() if character in "TFN" else character


@dataclass(frozen=True)
class Tags:
    """How arguments are written one by one.

    name, key: around the function's name and an argument's key. value: around a value; blanks around these are no part
    of it if `padded`. end: after the last argument. line: between all of these.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""
    line: str = "\n"
    padded: bool = False

    @cached_property
    def key_or_end(self) -> re.Pattern[str]:
        """Matches up to the next value, with the key as group 1, or the end, without."""
        begin, after, value = map(re.escape, (*self.key, self.value[0].strip()))
        between = rf"\s*{value}" if value else ""
        end = f"|{re.escape(self.end)}" if self.end else ""
        return re.compile(f"{begin}[\"']?([^<>]*?)[\"']?{after}{between}{end}|(?=</tool_call>)")

    @cached_property
    def after_value(self) -> tuple[str, ...]:
        """What ends a value: its tag or, where it is missing, on the next line another key or the end."""
        return (self.value[1].strip(), *((f"\n{self.key[0]}", f"\n{self.end}") if self.padded else ()))


class TaggedArguments:
    """The same for arguments between tags.

    Values become JSON by the function's schema, or by what they look like without one. A string by its schema comes
    piece by piece.
    """

    def __init__(self, tags: Tags, schema: Mapping[str, Any]) -> None:
        self.is_complete = False
        self._tags, self._schema = tags, schema
        self._num_keys = 0
        self._types: set[str] | None = None  # of the value
        self._step = self._key
        self._is_first = False  # whether none of the value was read

    def take(self, text: str) -> tuple[str, str]:
        """Read on, up to the end of the arguments."""
        added = ""
        while not self.is_complete:
            new, rest, goes_on = self._step(text)
            added, text = added + new, rest
            if not goes_on:
                break
        return added, text

    def _key(self, text: str) -> tuple[str, str, bool]:
        found = self._tags.key_or_end.search(text)
        if found is None:
            return "", text, False
        rest, comma = text[found.end() :], ", " if self._num_keys else "{"
        if found[1] is None:
            self.is_complete = True
            return "}" if self._num_keys else "{}", rest, False
        self._types = types_of(table_of(self._schema, "properties").get(found[1]), self._schema)
        self._num_keys, self._is_first, self._step = self._num_keys + 1, True, self._value
        quote = '"' if self._types == {"string"} else ""
        return f"{comma}{json.dumps(found[1], ensure_ascii=False)}: {quote}", rest, True

    def _value(self, text: str) -> tuple[str, str, bool]:
        tags, is_string = self._tags, self._types == {"string"}
        whole = text.removeprefix("\n") if self._is_first and tags.padded else text
        place, end = min(((whole.find(end), end) for end in tags.after_value if end in whole), default=(0, ""))
        if not end and not is_string:
            return "", text, False
        self._is_first = self._is_first and not text
        if end:
            self._step = self._key
            rest = whole[place + (len(end) if end == tags.after_value[0] else 1) :]
            whole = whole[:place].removesuffix("\n") if tags.padded else whole[:place]
            return f'{_escaped(whole)}"' if is_string else as_json(whole, self._types), rest, True
        held = [num_held(whole, end) for end in tags.after_value]
        if tags.padded:
            held.append(num_held(whole, f"\n{tags.after_value[0]}"))
        certain = len(whole) - max(held)
        return _escaped(whole[:certain]), whole[certain:], False


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
