"""Text for a terminal: lines that end between words, and no character that a terminal obeys."""

import re
from collections.abc import Callable

from rich.cells import cell_len

# Characters that terminals obey, but for line ends and tabs: a model's text is not to move the cursor.
_CONTROLS = {i: chr(0x2400 + i) for i in range(32) if chr(i) not in "\n\t"}
_CONTROLS |= {ord("\r"): "", 0x7F: "\u2421", **dict.fromkeys(range(0x80, 0xA0), "\ufffd")}
_WIDE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\U0001f300-\U0003fffd"
# A line end, spaces, a wide character, which a line may end after, or a part of a word.
_PARTS = re.compile(rf"\n|[^\S\n]+|[{_WIDE}]|[^\s{_WIDE}]+")


def visible(text: str) -> str:
    """The text with symbols for characters that terminals would obey."""
    return text.translate(_CONTROLS)


class Words:
    """Writes a word when it has ended, in a new line where it does not fit. width: None does not wrap.

    write: is called with a text and its style.
    """

    def __init__(self, write: Callable[[str, str | None], object], width: int | None) -> None:
        self._write, self._width = write, width
        self._column = 0
        self._spaces: list[tuple[str, str | None]] = []  # before the word
        self._word: list[tuple[str, str | None]] = []
        self._runs_on = False  # whether the word is written as it comes, because it is longer than a line

    def push(self, text: str, style: str | None) -> None:
        """Add a piece."""
        if self._width is None:
            self._write(text, style)
            return
        for part in _PARTS.findall(text):
            if part == "\n":
                self.close()
                self._write(part, style)
                self._column, self._runs_on = 0, False
            elif part.isspace():
                self._end_word()
                self._runs_on = False
                self._spaces.append((part.expandtabs(4), style))
            else:
                if _is_wide(part) or (self._word and _is_wide(self._word[-1][0])):
                    self._end_word()
                self._word.append((part, style))
                if self._runs_on or _width(self._word) > self._width:  # no line has room for it
                    self._end_word()
                    self._runs_on = True

    def close(self) -> None:
        """Write what is left."""
        self._end_word()
        self._put(self._spaces)

    def _end_word(self) -> None:
        if not self._word or self._width is None:
            return
        fits = self._column + _width(self._spaces) + _width(self._word) <= self._width
        if self._column and not fits and not self._runs_on:
            self._write("\n", None)
            self._column = 0
            self._spaces.clear()
        self._put(self._spaces)
        self._put(self._word)

    def _put(self, pieces: list[tuple[str, str | None]]) -> None:
        for text, style in pieces:
            self._write(text, style)
        self._column += _width(pieces)
        if self._width and self._column > self._width:  # a word longer than a line, which the terminal breaks
            self._column %= self._width
        pieces.clear()


def _is_wide(part: str) -> bool:
    return cell_len(part[0]) > 1


def _width(pieces: list[tuple[str, str | None]]) -> int:
    return sum(cell_len(text) for text, _ in pieces)
