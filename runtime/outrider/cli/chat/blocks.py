"""Markdown that is shown while it is written.

Finished blocks are printed once and for all, only the block under way is drawn again and again. A block is a paragraph,
a heading, a table, a whole code block, or an item of a list that is not in another one.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown, MarkdownElement
from rich.segment import Segment
from rich.syntax import Syntax

from outrider.cli.words import visible

_LISTS = ("bullet_list_open", "ordered_list_open")
# Without HTML, "<think>" and "List<int>" are text. rich shows nothing of HTML.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class MarkdownBlock(NamedTuple):
    """A part of a text. apart: an empty line goes before it; not before an item of the list under way."""

    source: str
    apart: bool


class MarkdownBlocks:
    """Cuts a text that comes piece by piece into blocks.

        blocks = MarkdownBlocks()
        blocks.push("# Title\\n\\nSome ")    # [MarkdownBlock("# Title\\n", apart=False)]
        blocks.rest                         # MarkdownBlock("Some ", apart=True)

    A block is finished when another one has begun with a whole line: half a line may still become something else.
    All blocks and the rest make the text, with symbols for control characters.
    """

    def __init__(self) -> None:
        self._text = ""
        self._apart = False

    @property
    def rest(self) -> MarkdownBlock:
        """The block that is not finished yet; empty if there is none."""
        return MarkdownBlock(self._text, self._apart)

    def push(self, text: str) -> list[MarkdownBlock]:
        """Add text. Returns the blocks that it finishes."""
        self._text += visible(text)
        if "\n" not in text:
            return []
        begins = _begins(self._text[: self._text.rindex("\n") + 1])
        return self._cut(begins[1:])

    def finish(self) -> list[MarkdownBlock]:
        """The last blocks, as no text follows."""
        found = self._cut(_begins(self._text)[1:])
        last, self._text = self.rest, ""
        return [*found, last] if last.source.strip() else found

    def _cut(self, begins: list[tuple[int, bool]]) -> list[MarkdownBlock]:
        """Take off the blocks before each of these lines."""
        lines = self._text.split("\n")
        made, before = list[MarkdownBlock](), 0
        for line, apart in begins:
            made.append(MarkdownBlock("\n".join([*lines[before:line], ""]), self._apart))
            before, self._apart = line, apart
        self._text = "\n".join(lines[before:])
        return made


def _begins(text: str) -> list[tuple[int, bool]]:
    """For each block the line that it begins with, and whether it stands apart from the one before."""
    begins: list[tuple[int, bool]] = []
    in_list = False
    for token in _PARSER.parse(text):
        if token.map is None or token.nesting < 0:
            continue
        if token.level == 0 and token.type in _LISTS:
            in_list = False  # its first item stands apart
        elif token.level == 0:
            begins.append((token.map[0], True))
        elif token.level == 1 and token.type == "list_item_open":
            begins.append((token.map[0], not in_list))
            in_list = True
    return begins


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


class Rendered:
    """A block as lines of a terminal. most: shows the last lines only, if there are more."""

    def __init__(self, block: MarkdownBlock, most: int | None = None) -> None:
        self.block, self.most = block, most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_Markdown(self.block.source), options, pad=False)
        while lines and _is_blank(lines[0]):
            del lines[0]
        while lines and _is_blank(lines[-1]):
            del lines[-1]
        if lines and self.block.apart:
            lines.insert(0, [])
        for line in lines if self.most is None else lines[-self.most :]:
            yield from line
            yield Segment.line()


def _is_blank(line: list[Segment]) -> bool:
    return not any(segment.text.strip() for segment in line)
