"""An answer as Markdown while it comes, and words at the end of lines."""

import io
import random
import re

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.markdown import Markdown

from outrider.cli.chat.views import MarkdownView
from outrider.cli.words import Words
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

| a | b |
|---|---|
| 1 | 2 |

> quoted
> twice
The end
"""


def shown(text: str, *, height: int = 24, terminal: bool = False) -> str:
    """What the view writes of a text that comes word by word."""
    screen = Console(file=io.StringIO(), width=60, height=height, force_terminal=terminal, color_system=None)
    view = MarkdownView(screen)
    for word in re.split("(?<= )", text):
        view.add(TextChunk(word, Stats()))
    view.close()
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_an_answer_looks_as_a_whole() -> None:
    whole = Console(file=io.StringIO(), width=60, color_system=None)
    whole.print(Markdown(DOCUMENT))
    assert isinstance(whole.file, io.StringIO)
    lines = [[line.rstrip() for line in each.splitlines()] for each in (whole.file.getvalue(), shown(DOCUMENT))]
    assert lines[1] == lines[0]


def test_html_and_addresses_are_shown_and_control_characters_as_symbols() -> None:
    text = shown("<think>\nList<int> \x1b[2J\x07 [here](https://example.org)\n</think>")
    for word in ("<think>", "List<int>", "␛[2J␇", "https://example.org", "</think>"):
        assert word in text
    assert "\x1b" not in text


def test_code_can_be_copied() -> None:
    text = shown("```python\ndef f(x):\n    return x\n```\n")
    assert [line.rstrip() for line in text.splitlines()] == ["def f(x):", "    return x"]


def test_a_long_answer_is_printed_once_however_small_the_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last lines are drawn again, and never more of them than fit."""
    monkeypatch.setattr("outrider.cli.chat.views._SECONDS", 0)
    monkeypatch.setattr("outrider.cli.chat.views._MOST_SHARE", 1e9)
    paragraphs = [f"Paragraph {i} of many." for i in range(30)] + ["\n".join(f"    line {i}" for i in range(40))]
    text = shown("\n\n".join(paragraphs), height=5, terminal=True)
    screen, row = list[str](), 0  # as a terminal shows it: each erased line is written anew
    for part in re.split(r"(\n|\r|\x1b\[[0-9;?]*[A-Za-z])", text):
        if part == "\n":
            row += 1
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            screen[row:] = [*screen[row : row + 1], *screen[row + 1 :]]
            screen[row] = ""
        elif part and part[0] not in "\r\x1b":
            screen += [""] * (row + 1 - len(screen))
            screen[row] += part
        screen += [""] * (row + 1 - len(screen))
    found = [line.strip() for line in screen if line.strip()]
    assert found == [*paragraphs[:-1], *(f"line {i}" for i in range(40))]


def test_reasoning_is_folded_to_a_line() -> None:
    screen = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    view = MarkdownView(screen, ReasoningFormat.of_template("<think>"))
    for i, word in enumerate(["I ", "think", ".\n", "</think>", "\n\nYes", "."]):
        view.add(TextChunk(word, Stats(), tokens=[AnswerToken(i)], thinks=True))
    view.close()
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    assert "Yes." in text
    assert "I think" not in text
    assert re.search(r"Thought for [345] tokens\.", text)


def wrapped(text: str, width: int | None, cuts: random.Random) -> str:
    written: list[str] = []
    words = Words(lambda part, _: written.append(part), width)
    while text:
        length = cuts.randint(1, 7)
        words.push(text[:length], None)
        text = text[length:]
    words.close()
    return "".join(written)


@pytest.mark.parametrize("seed", range(20))
def test_words_stay_whole_however_they_come(seed: int) -> None:
    source = random.Random(seed)
    text = "".join(
        source.choice(["an ", "elephant", " ", "\n", "    ", "日本語", "organizations. "]) for _ in range(60)
    )
    width = source.randint(30, 60)
    lines = wrapped(text, width, source).split("\n")
    assert max(cell_len(line.rstrip()) for line in lines if " " in line.strip()) <= width
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert wrapped(text, width, source) == "\n".join(lines)
    assert wrapped(text, None, source) == text


def test_a_word_goes_to_the_next_line() -> None:
    assert wrapped("the elephant and the dog", 12, random.Random(0)) == "the elephant\nand the dog"
    assert wrapped("  indented", 4, random.Random(0)) == "  indented"


def test_a_word_longer_than_a_line_is_written_as_it_comes() -> None:
    written: list[str] = []
    words = Words(lambda part, _: written.append(part), 8)
    for part in ("An ", "66666", "6666", "66", "6", " and"):
        words.push(part, None)
    assert "".join(written) == "An\n" + 12 * "6"
    words.close()
    assert "".join(written) == "An\n" + 12 * "6" + " and"
