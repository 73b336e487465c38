"""The keyboard while an answer is written: Ctrl-C ends the answer, and what is typed is kept for the next prompt.

with held_back(sys.stdin) as typed, interruptible(session.send("Hello"), session.cancel) as chunks:
    for chunk in chunks: ...
typed()    # "and another thing"
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Event, Thread, current_thread, main_thread
from typing import TextIO, TypeAlias

from outrider.decoding.results import TextChunk

News: TypeAlias = TextChunk | BaseException | None  # None: the answer has ended

_SECONDS = 0.1  # between two looks at whether Ctrl-C came


@contextmanager
def interruptible(chunks: Iterable[TextChunk], cancel: Callable[[], object]) -> Iterator[Iterator[TextChunk]]:
    """The same pieces of an answer, which Ctrl-C ends.

        with interruptible(session.send("Hello"), session.cancel) as chunks:
            for chunk in chunks: ...

    They are read in a thread: on Windows a main thread that waits for a piece would see Ctrl-C only when one comes.
    Cancelling is repeated until the answer ends, as an answer that has not begun yet cannot be cancelled. An answer
    that is not read to its end is cancelled, too.
    """
    news: SimpleQueue[News] = SimpleQueue()
    came = Event()

    def read() -> None:
        try:
            for chunk in chunks:
                news.put(chunk)
            news.put(None)
        except BaseException as error:
            news.put(error)

    def interrupt(*_: object) -> None:
        came.set()
        cancel()

    reader = Thread(target=read, name="outrider chat", daemon=True)
    with on_interrupt(interrupt):
        reader.start()
        try:
            yield _received(news, came, cancel)
        finally:
            while reader.is_alive():
                cancel()
                reader.join(_SECONDS)


def _received(news: SimpleQueue[News], came: Event, cancel: Callable[[], object]) -> Iterator[TextChunk]:
    while True:
        try:
            new = news.get(timeout=_SECONDS)
        except Empty:
            if came.is_set():
                cancel()
            continue
        if isinstance(new, BaseException):
            raise new
        if new is None:
            return
        yield new


@contextmanager
def on_interrupt(handler: Callable[..., None]) -> Iterator[None]:
    """Call `handler` for Ctrl-C during the block. Only the main thread can ask for that; elsewhere nothing changes."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_MAX_BYTES = 1 << 16  # bytes
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
        while msvcrt.kbhit() and len(typed) < _MAX_BYTES:
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
            while len(found) < _MAX_BYTES and select.select([descriptor], [], [], 0)[0]:
                if not (piece := os.read(descriptor, 1 << 12)):
                    break
                found += piece
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
