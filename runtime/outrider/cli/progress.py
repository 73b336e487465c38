"""The log's messages on standard error, and the line that says what a command is doing.

with progress_line("Loading smollm2."):
    load(bundle)
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.status import Status


class _Handler(logging.Handler):
    """Prints messages unchanged, and those of a `progress_line` in that line."""

    status: Status | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Show one message."""
        if self.status is not None and record.levelno <= logging.INFO:
            self.status.update(record.getMessage())
        else:
            print(record.getMessage(), file=sys.stderr, flush=True)


_handler = _Handler()


def show_progress() -> None:
    """Show the log's messages on standard error."""
    log = logging.getLogger("outrider")
    if not log.handlers:
        log.addHandler(_handler)
        log.setLevel(logging.INFO)
        log.propagate = False


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
