"""The log's messages on standard error, and the line that says what a command is doing."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from outrider.errors import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.status import Status

    from outrider.decoding.results import TextChunk


MOST_WAITING = 1000  # messages
_LAST_WRITES = 1.0  # seconds, at most, in which the last messages are written


class _Lines(logging.Formatter):
    """A message on one line, whatever is in it; where there was an exception, its lines follow, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(f"  {printable(line)}" for line in super().formatException(ei).splitlines())


class _Handler(logging.Handler):
    """Prints messages, and those of a `progress_line` in that line."""

    status: Status | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.status is not None and record.levelno <= logging.INFO:
            self.status.update(self.format(record))
        else:
            print(self.format(record), file=sys.stderr, flush=True)


class _Waiting(logging.Handler):
    """Keeps messages for another thread, and drops them while `MOST_WAITING` are waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.records = queue.Queue[logging.LogRecord | None](MOST_WAITING)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self.records.put_nowait(record)

    def show(self) -> None:
        """Show messages until None comes."""
        while (record := self.records.get()) is not None:
            _handler.handle(record)


_handler = _Handler()
_handler.setFormatter(_Lines())


def show_progress() -> None:
    """Show the log's messages on standard error."""
    log = logging.getLogger("outrider")
    if not log.handlers:
        log.addHandler(_handler)
        log.setLevel(logging.INFO)
        log.propagate = False


@contextmanager
def shown_in_background() -> Iterator[None]:
    """Write the log's messages in a thread of its own.

    Who starts a server may give it a pipe for standard error and never read it. When that is full, a write waits for
    ever, and so would every request after it.
    """
    log, waiting = logging.getLogger("outrider"), _Waiting()
    before, log.handlers = log.handlers, [waiting]
    thread = threading.Thread(target=waiting.show, name="outrider-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        log.handlers = before
        with suppress(queue.Full):
            waiting.records.put_nowait(None)
        thread.join(_LAST_WRITES)


def reading_shown(chunks: Iterable[TextChunk]) -> Iterator[TextChunk]:
    """The chunks of an answer. Those that say how far its prompt is read are a line on a terminal until the others."""
    from outrider.cli.console import err

    with ExitStack() as shown:
        line: Status | None = None
        for chunk in chunks:
            if not chunk.is_progress:
                shown.close()
                yield chunk
            elif line is not None:
                line.update(chunk.stats.progress)
            elif err.is_terminal:
                line = shown.enter_context(err.status(chunk.stats.progress, spinner="dots"))


@contextmanager
def progress_line(message: str, *, quiet: bool = False) -> Iterator[None]:
    """Show a message, and what is logged in its place. On a terminal, the line goes when the block ends."""
    from outrider.cli.console import err

    if not err.is_terminal:
        if not quiet:
            err.print(message)
        yield
        return
    with err.status(message, spinner="dots") as _handler.status:
        try:
            yield
        finally:
            _handler.status = None
