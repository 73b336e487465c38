"""Ctrl-C while an answer is written ends the answer."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Event, Thread, current_thread, main_thread
from typing import TypeAlias

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
