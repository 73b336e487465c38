"""Ways to show an answer while it comes: as it is, as Markdown, or with the source of each token."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Protocol

from rich.cells import cell_len
from rich.live import Live
from rich.text import Text

from outrider.cli.chat.blocks import Block, Blocks, Rendered, visible
from outrider.cli.chat.sources import LOOKS, Pieces, count_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console

    from outrider.cli.chat.session import Session
    from outrider.decoding.results import Source, TextChunk

_SECONDS = 0.05  # between two drawings of the block under way


class View(Protocol):
    """Shows one answer."""

    def add(self, chunk: TextChunk) -> None:
        """Show the next piece."""

    def close(self) -> None:
        """Show what is left. No piece follows."""


class PlainView:
    """The text as it is."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def add(self, chunk: TextChunk) -> None:
        """Write it, unchanged."""
        self._console.file.write(chunk.text)
        self._console.file.flush()

    def close(self) -> None:
        """End the last line."""
        self._console.file.write("\n")
        self._console.file.flush()


class DraftsView:
    """The text with the source of each token: in colours, or with marks where there are none. Ends with a legend."""

    def __init__(self, console: Console, pieces: Pieces) -> None:
        self._console, self._pieces = console, pieces
        self._marks = not shows_colours(console)
        self._words = Words(self._write, console.width if console.is_terminal else None)
        self._latest: Source | None = None
        self._counts: dict[Source, int] = dict.fromkeys(LOOKS, 0)

    def add(self, chunk: TextChunk) -> None:
        """Write the pieces of all tokens."""
        for text, source in self._pieces.push(chunk):
            mark = LOOKS[source].mark if self._marks and source != self._latest else ""
            style = None if self._marks else LOOKS[source].style
            self._words.push(mark + visible(text), style)
            self._latest = source
        for source, count in count_sources(chunk.tokens).items():
            self._counts[source] += count
        self._console.file.flush()

    def close(self) -> None:
        """Write how many tokens there were of each kind."""
        self._words.close()
        self._console.out("\n")
        legend = Text()
        for source, count in self._counts.items():
            look = LOOKS[source]
            legend.append("  " if legend else "")
            legend.append(f"{look.mark if self._marks else ''}{source}", style="" if self._marks else look.style)
            legend.append(f" {count}")
        self._console.print(legend)

    def _write(self, text: str, style: str | None) -> None:
        self._console.out(text, style=style, end="", highlight=False)


class MarkdownView:
    """The text as Markdown: finished blocks are printed, and the last lines of the block under way are drawn anew."""

    def __init__(self, console: Console) -> None:
        self._console, self._blocks = console, Blocks()
        self._live = Live(Rendered(Block("…", apart=False)), console=console, auto_refresh=False, transient=True)
        self._drawn = 0.0  # when
        self._live.start(refresh=True)

    def add(self, chunk: TextChunk) -> None:
        """Print the blocks that are finished, and draw the one under way."""
        finished = self._blocks.push(chunk.text)
        now = time.monotonic()
        if not finished and now - self._drawn < _SECONDS:
            return
        self._drawn = now
        tail = Rendered(self._blocks.rest, max(self._console.size.height - 1, 1))
        self._live.update(tail)  # before printing: that draws the tail again, below
        self._print(finished)
        self._live.refresh()

    def close(self) -> None:
        """Print the last block in place of its drawing."""
        last = self._blocks.finish()
        self._live.update("")
        self._live.stop()
        self._print(last)

    def _print(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._console.print(Rendered(block), end="")


def shows_colours(console: Console) -> bool:
    """Whether text can have colours there: it is a terminal, and NO_COLOR is not set."""
    return console.color_system is not None and not console.no_color


def view_of(session: Session, console: Console) -> View:
    """The view for the next answer."""
    if session.drafts:
        return DraftsView(console, Pieces(session.engine.tokenizer.decode))
    return MarkdownView(console) if console.is_terminal else PlainView(console)


def show(chunks: Iterable[TextChunk], view: View) -> None:
    """Show an answer to its end. What was given out before an error is shown, too."""
    try:
        for chunk in chunks:
            view.add(chunk)
    finally:
        view.close()


_WIDE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\U0001f300-\U0003fffd"
# A line end, spaces, a wide character, which a line may end behind, or a part of a word.
_PARTS = re.compile(rf"\n|[^\S\n]+|[{_WIDE}]|[^\s{_WIDE}]+")


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
