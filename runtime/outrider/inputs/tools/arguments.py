"""Arguments of a call in a text that grows: as JSON, whatever the format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outrider.inputs.tools.values import as_json, table_of, types_of

_ESCAPED = '"\\/bfnrtu'  # what a backslash may stand before in JSON
_LONGEST_END = 32  # characters of a tag after a value, with the line break before it
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
    """How arguments are written one by one."""

    name: tuple[str, str]  # around the function's name
    key: tuple[str, str]  # around an argument's key
    value: tuple[str, str]  # around a value
    end: str = ""  # after the last argument
    line: str = "\n"  # between all of these
    padded: bool = False  # line breaks around a value are no part of it

    @cached_property
    def key_or_end(self) -> re.Pattern[str]:
        """Matches up to the next value, with the key as group 1, or the end, without."""
        begin, after, value = map(re.escape, (*self.key, self.value[0].strip()))
        between = rf"\s*{value}" if value else ""
        end = f"|{re.escape(self.end)}" if self.end else ""
        return re.compile(f"{begin}[\"']?([^<>]*?)[\"']?{after}{between}{end}|(?=</tool_call>)")

    @cached_property
    def after_value(self) -> re.Pattern[str]:
        """What ends a value: its tag or, where it is missing, on the next line another key or the end."""
        tag, others = re.escape(self.value[1].strip()), "|".join(map(re.escape, (self.key[0], self.end)))
        return re.compile(f"\n?{tag}|\n(?={others})" if self.padded else tag)


class TaggedArguments:
    """The same for arguments between tags, each of which is given when its value is complete.

    Values become JSON by the function's schema, or by what they look like without one.
    """

    def __init__(self, tags: Tags, schema: Mapping[str, Any]) -> None:
        self.is_complete = False
        self._tags, self._schema = tags, schema
        self._num_keys = 0
        self._num_searched = 0  # characters of the value, in which its end was not found

    def take(self, text: str) -> tuple[str, str]:
        """Read on, up to the end of the arguments."""
        added = ""
        while not self.is_complete and (found := self._tags.key_or_end.search(text)):
            key = found[1]
            if key is None:
                self.is_complete = True
                return added + ("}" if self._num_keys else "{}"), text[found.end() :]
            end = self._tags.after_value.search(text, found.end() + self._num_searched)
            if end is None:
                self._num_searched = max(len(text) - found.end() - _LONGEST_END, 0)
                break
            value, text = text[found.end() : end.start()], text[end.end() :]
            types = types_of(table_of(self._schema, "properties").get(key), self._schema)
            value = as_json(value.removeprefix("\n") if self._tags.padded else value, types)
            added += f"{', ' if self._num_keys else '{'}{json.dumps(key, ensure_ascii=False)}: {value}"
            self._num_keys, self._num_searched = self._num_keys + 1, 0
        return added, text


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
