"""Ctrl-C while an answer is written ends the answer."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from threading import current_thread, main_thread

from outrider.decoding.results import TextChunk


@contextmanager
def interruptible(
    chunks: Generator[TextChunk, None, None], cancel: Callable[[], object]
) -> Iterator[Iterator[TextChunk]]:
    """The same pieces of an answer, which Ctrl-C ends.

        with interruptible(session.send("Hello"), session.cancel) as chunks:
            for chunk in chunks: ...

    It is cancelled between two pieces: a signal may come while this thread holds an engine's lock. That is repeated, as
    an answer that has not begun yet cannot be cancelled. One that is not read to its end is closed.
    """
    came = False

    def interrupt(*_: object) -> None:
        nonlocal came
        came = True

    def passed_on() -> Iterator[TextChunk]:
        for chunk in chunks:
            if came:
                cancel()
            yield chunk

    with on_interrupt(interrupt), closing(chunks):
        yield passed_on()


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
