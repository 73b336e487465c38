"""Ways to show an answer while it comes: as it is, as Markdown, or with the source of each token."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Markdown, MarkdownElement
from rich.segment import Segment, Segments
from rich.syntax import Syntax
from rich.text import Text

from outrider.cli.chat.session import Session
from outrider.cli.chat.sources import LOOKS, Pieces, count_sources
from outrider.cli.progress import reading_shown
from outrider.cli.words import Words, visible
from outrider.decoding.results import Source, TextChunk
from outrider.inputs.reasoning import ReasoningFormat, split
from outrider.inputs.reasoning.calls import CallsWithin
from outrider.inputs.reasoning.stream import Splitter

_SECONDS = 0.05  # between two drawings
_MOST_SHARE = 0.1  # of the time, that drawing takes
# Without HTML, "<think>" and "List<int>" are text. rich shows nothing of HTML.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


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


class _Code(CodeBlock):
    """Code without a frame of spaces, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, background_color="default")


class _Markdown(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "fence": _Code, "code_block": _Code}

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)  # a link's address is shown
        self.parsed = _PARSER.parse(text)


class MarkdownView:
    """The text as Markdown: while it comes as many of its last lines as the terminal has, then all of it.

    form: of the model's reasoning, of which one line says how long it was.
    """

    def __init__(self, console: Console, form: ReasoningFormat | None = None) -> None:
        self._console, self._form = console, form
        self._text = ""
        self._reasoning: Splitter | CallsWithin | None = None
        self._num_thoughts = 0  # tokens
        self._has_thought = False
        self._live = Live(Text("…"), console=console, auto_refresh=False, transient=True)
        self._next = 0.0  # when it may be drawn again
        self._live.start(refresh=True)

    def add(self, chunk: TextChunk) -> None:
        """Draw the last lines, or how far the prompt is read."""
        if chunk.is_progress:
            self._live.update(Text(chunk.stats.progress, style="dim"), refresh=True)
            return
        self._text += visible(self._said(chunk))
        began = time.monotonic()
        if began < self._next:
            return
        if self._reasoning is not None and self._reasoning.is_reasoning:
            self._live.update(Text(f"Thinking … {self._num_thoughts} tokens", style="dim"), refresh=True)
        else:
            last = self._lines()[-max(self._console.size.height - 1, 1) :]
            self._live.update(_printable(last), refresh=True)
        self._next = began + max(_SECONDS, (time.monotonic() - began) / _MOST_SHARE)

    def _lines(self) -> list[list[Segment]]:
        """The text as lines of the terminal."""
        lines = self._console.render_lines(_Markdown(self._text), pad=False)
        while lines and _is_blank(lines[-1]):
            del lines[-1]
        num_blank = next((i for i, line in enumerate(lines) if not _is_blank(line)), 0)
        return lines[num_blank:]

    def _said(self, chunk: TextChunk) -> str:
        """What a chunk says, without reasoning."""
        if self._form is None:
            return chunk.text
        if self._reasoning is None:
            self._reasoning = self._form.stream(opened=chunk.thinks)
        pieces = self._reasoning.push(chunk.text)
        reasoning, said = split(pieces)
        self._has_thought = self._has_thought or bool(reasoning)
        if self._has_thought and (self._reasoning.is_reasoning or reasoning):
            self._num_thoughts += len(chunk.tokens)
        if said:
            self._note_thoughts()
        return said

    def _note_thoughts(self) -> None:
        if self._has_thought:
            self._console.print(f"Thought for {self._num_thoughts} tokens.", style="dim", highlight=False)
        self._has_thought = False

    def close(self) -> None:
        """Print all of it."""
        self._note_thoughts()
        self._text += visible(split(self._reasoning.finish())[1] if self._reasoning else "")
        self._live.stop()
        self._console.print(_printable(self._lines()), end="")


def _printable(lines: list[list[Segment]]) -> Group:
    return Group(*(Segments([*line, Segment.line()]) for line in lines))


def _is_blank(line: list[Segment]) -> bool:
    return not any(segment.text.strip() for segment in line)


View = PlainView | DraftsView | MarkdownView


def shows_colours(console: Console) -> bool:
    """Whether text can have colours there: it is a terminal, and NO_COLOR is not set."""
    return console.color_system is not None and not console.no_color


def view_of(session: Session, console: Console) -> View:
    """The view for the next answer."""
    if session.drafts:
        return DraftsView(console, Pieces(session.engine.tokenizer.decode))
    return MarkdownView(console, session.engine.reasoning_format) if console.is_terminal else PlainView(console)


def show(chunks: Iterable[TextChunk], view: View) -> None:
    """Show an answer to its end. What was given out before an error is shown, too."""
    try:
        for chunk in chunks if isinstance(view, MarkdownView) else reading_shown(chunks):
            view.add(chunk)
    finally:
        view.close()
