"""What is typed while an answer is written: not shown in it, and kept for the next prompt.

with held_back(sys.stdin) as typed:
    ...
typed()    # "and another thing"
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MOST = 1 << 16  # bytes
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.|.)?")  # arrows and other keys


@contextmanager
def held_back(keyboard: TextIO) -> Iterator[Callable[[], str]]:
    """Do not echo what is typed during the block; Ctrl-C interrupts as before. Yields what reads it afterwards.

    A keyboard that is no terminal, such as a test's, is left alone.
    """
    if not keyboard.isatty():
        yield str
    elif sys.platform == "win32":  # which echoes only what a program reads
        yield _typed_on_windows
    else:
        with _without_echo(keyboard.fileno()) as typed:
            yield typed


def without_keys(typed: str) -> str:
    """The text in what was typed: lines become spaces, as nothing is sent before it was seen, and keys are left out."""
    text = _ESCAPES.sub("", typed).replace("\r", " ").replace("\n", " ")
    made: list[str] = []
    for character in text:
        if character in "\b\x7f":
            del made[-1:]
        elif character >= " ":
            made.append(character)
    return "".join(made).strip()


if sys.platform == "win32":
    import msvcrt

    def _typed_on_windows() -> str:
        typed = ""
        while msvcrt.kbhit() and len(typed) < _MOST:
            character = msvcrt.getwch()
            if character in "\x00\xe0":  # the first of two of a key without a character
                msvcrt.getwch()
            else:
                typed += character
        return without_keys(typed)

else:
    import select
    import termios

    @contextmanager
    def _without_echo(descriptor: int) -> Iterator[Callable[[], str]]:
        found = b""
        before = termios.tcgetattr(descriptor)
        quiet = termios.tcgetattr(descriptor)
        quiet[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
        try:
            yield lambda: without_keys(found.decode("utf-8", "ignore"))
        finally:
            while len(found) < _MOST and select.select([descriptor], [], [], 0)[0]:
                if not (piece := os.read(descriptor, 1 << 12)):
                    break
                found += piece
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
