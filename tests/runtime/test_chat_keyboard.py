"""The chat in a terminal: what is typed during an answer, and words at the end of lines."""

import os
import random
from pathlib import Path

import pytest
from rich.cells import cell_len

from outrider.cli.chat.keyboard import held_back, without_keys
from outrider.cli.words import Words


@pytest.mark.needs("POSIX")
def test_what_is_typed_during_an_answer_is_kept_and_not_shown() -> None:
    import pty
    import termios

    ours, theirs = pty.openpty()
    try:
        with open(theirs, closefd=False) as keyboard:
            before = termios.tcgetattr(theirs)
            with held_back(keyboard) as typed:
                os.write(ours, b"typed ahead\rsecond\x1b[Dd\x7f")
            assert typed() == "typed ahead second"
            assert termios.tcgetattr(theirs) == before
        os.set_blocking(ours, False)
        with pytest.raises(BlockingIOError):
            os.read(ours, 100)
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_keyboard_that_is_no_terminal_is_left_alone() -> None:
    with Path(os.devnull).open() as keyboard, held_back(keyboard) as typed:
        pass
    assert typed() == ""


@pytest.mark.parametrize(("typed", "text"), [
    ("", ""), ("a\x1b[1;5Cb", "ab"), ("a\x1bOPb", "ab"), ("ab\x7f\x7f\x7fc", "c"), ("a\r\n\tb\x03", "a  b"),
    ("é\r", "é"),
])  # fmt: skip
def test_keys_are_left_out(typed: str, text: str) -> None:
    assert without_keys(typed) == text


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
