"""What a load is doing, said to the log and to whoever listens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

log = logging.getLogger("outrider")
_listener: ContextVar[Callable[[str], object] | None] = ContextVar("listener", default=None)
_level: ContextVar[int] = ContextVar("level", default=logging.INFO)


def report(message: str) -> None:
    """Say what is done now, in one line."""
    log.log(_level.get(), "%s", message)
    if called := _listener.get():
        called(message)


@contextmanager
def listener(called: Callable[[str], object] | None) -> Iterator[None]:
    """Call a function with each message of this thread's block. None: no other function than before."""
    token = _listener.set(called or _listener.get())
    try:
        yield
    finally:
        _listener.reset(token)


def report_details() -> None:
    """What this thread does from now on is a detail, as it runs beside answers that are printed."""
    _level.set(logging.DEBUG)
