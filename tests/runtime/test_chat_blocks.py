"""Markdown that comes piece by piece is cut where nothing can change any more, and all of it is shown."""

import io
import re
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.markdown import Markdown

from outrider.cli.chat.blocks import MarkdownBlock, MarkdownBlocks, Rendered
from outrider.cli.chat.views import MarkdownView
from outrider.cli.words import visible
from outrider.decoding.metrics import Stats
from outrider.decoding.results import AnswerToken, TextChunk
from outrider.inputs.reasoning import ReasoningFormat

DOCUMENT = """\
# Title

Some **bold** text
over two lines.

1. one
2. two

   more of two
3. three
   - below
   - it

- another list
Title again
===
```python
def f(x):

    return x
```
| a | b |
|---|---|
| 1 | 2 |

> quoted
> twice
The end
"""
BLOCKS = [
    "# Title\n\n",
    "Some **bold** text\nover two lines.\n\n",
    "1. one\n",
    "2. two\n\n   more of two\n",
    "3. three\n   - below\n   - it\n\n",
    "- another list\nTitle again\n===\n",
    "```python\ndef f(x):\n\n    return x\n```\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n",
    "> quoted\n> twice\nThe end\n",
]
TEXTUAL = ["word", "", "", "# head", "#tag", "===", "---", "> quote", "<div>", "<think>", "\x1b[2J", "\\"]
LISTS = ["- item", "  - below", "* star", "+ x", "1. one", "2. two", "   more", "2.5 apples"]
LINES = st.sampled_from([*TEXTUAL, *LISTS, "```", "```py", "    code", "| a | b |", "|---|---|"])


def console(*, height: int = 24, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=60, height=height, force_terminal=terminal, color_system=None)


def printed(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def cut(pieces: Sequence[str]) -> list[MarkdownBlock]:
    blocks = MarkdownBlocks()
    found = [block for piece in pieces for block in blocks.push(piece)]
    return found + blocks.finish()


def test_blocks_of_a_document() -> None:
    found = cut([DOCUMENT])
    assert [block.source for block in found] == BLOCKS
    assert [block.apart for block in found] == [False, True, True, False, False, True, True, True, True]


@given(st.lists(LINES, max_size=12), st.data())
def test_any_text_is_cut_alike_and_nothing_is_lost(lines: list[str], data: st.DataObject) -> None:
    text = "\n".join(lines)
    ends = data.draw(st.sets(st.integers(0, len(text))))
    edges = [0, *sorted(ends), len(text)]
    pieces = [text[i:j] for i, j in pairwise(edges)]
    found = cut(pieces)
    assert found == cut([text])
    assert "".join(block.source for block in found).rstrip() == visible(text).rstrip()


@given(st.lists(LINES, max_size=12))
def test_only_finished_blocks_are_given_out(lines: list[str]) -> None:
    """What was given out stays, whatever follows."""
    blocks, text, given_out = MarkdownBlocks(), "", list[MarkdownBlock]()
    for line in lines:
        text += line + "\n"
        given_out += blocks.push(line + "\n")
        assert cut([text])[: len(given_out)] == given_out


def test_half_a_line_finishes_nothing() -> None:
    blocks = MarkdownBlocks()
    assert blocks.push("1. one\n2.") == []  # not yet an item
    assert blocks.push("5 apples\n") == []  # which goes on with the first item
    assert blocks.rest.source == "1. one\n2.5 apples\n"


def test_blocks_look_as_the_whole_does() -> None:
    whole, parts = console(), console()
    text = DOCUMENT.replace("```python\ndef f(x):\n\n    return x\n```\n", "")
    whole.print(Markdown(text))
    for block in cut([text]):
        parts.print(Rendered(block), end="")
    lines = [[line.rstrip() for line in printed(each).splitlines() if line.strip()] for each in (whole, parts)]
    assert lines[0] == lines[1]


def test_html_and_addresses_are_shown_and_control_characters_as_symbols() -> None:
    screen = console()
    text = "<think>\nList<int> \x1b[2J\x07 [here](https://example.org)\n</think>"
    for block in cut([text]):
        screen.print(Rendered(block), end="")
    for word in ("<think>", "List<int>", "␛[2J␇", "https://example.org", "</think>"):
        assert word in printed(screen)
    assert "\x1b" not in printed(screen)


def test_code_can_be_copied() -> None:
    screen = console()
    for block in cut(["```python\ndef f(x):\n    return x\n```\n"]):
        screen.print(Rendered(block), end="")
    assert [line.rstrip() for line in printed(screen).splitlines()] == ["def f(x):", "    return x"]


def test_a_long_answer_is_printed_once_however_small_the_terminal_is() -> None:
    """Only what is under way is drawn again, and never more of it than fits."""
    screen = console(height=5, terminal=True)
    view = MarkdownView(screen)
    paragraphs = [f"Paragraph {i} of many." for i in range(30)] + ["\n".join(f"    line {i}" for i in range(40))]
    for word in "\n\n".join(paragraphs).split(" "):
        view.add(TextChunk(word + " ", Stats()))
    view.close()
    text = printed(screen)
    final = text[text.rindex("line 0") :] if "line 0" in text else ""
    assert [line.strip() for line in final.splitlines() if line.strip()] == [f"line {i}" for i in range(40)]
    order = [text.rindex(f"Paragraph {i} of many.") for i in range(30)]
    assert order == sorted(order)


def test_the_drawing_has_the_last_lines() -> None:
    screen = console()
    screen.print(Rendered(MarkdownBlock("    1\n    2\n    3\n", apart=True), most=2), end="")
    assert printed(screen).split() == ["2", "3"]


def test_reasoning_is_folded_to_a_line() -> None:
    screen = console(terminal=True)
    view = MarkdownView(screen, ReasoningFormat.of_template("<think>"))
    for i, word in enumerate(["I ", "think", ".\n", "</think>", "\n\nYes", "."]):
        view.add(TextChunk(word, Stats(), tokens=[AnswerToken(i)], thinks=True))
    view.close()
    text = printed(screen)
    assert "Yes." in text
    assert "I think" not in text
    assert re.search(r"Thought for [345] tokens\.", text)
