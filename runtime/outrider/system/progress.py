"""What a load is doing, said to the log and to whoever listens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

log = logging.getLogger("outrider")
_listener: ContextVar[Callable[[str], object] | None] = ContextVar("listener", default=None)


def report(message: str) -> None:
    """Say what is done now, in one line."""
    log.info("%s", message)
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
