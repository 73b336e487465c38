"""What an engine does while no request runs, a part at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from outrider.types import Backend

log = logging.getLogger("outrider")


@contextmanager
def harmless(fault: str) -> Iterator[None]:
    """Log what is raised within, after these words: no request depends on a job."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %r", fault, error)


class IdleJob(Protocol):
    """A job for the time without requests. Its methods never raise.

    while job.is_due:
        job.go_on(main, is_cancelled)
    job.pause()    # a request has come
    """

    @property
    def is_due(self) -> bool:
        """Whether there is something to do."""

    @property
    def has_begun(self) -> bool:
        """Whether it is partly done, in a slot that is still open."""

    def go_on(self, main: Backend, is_cancelled: Callable[[], bool]) -> None:
        """Do the next part, about as long as a call. is_cancelled: whether somebody waits for the end of it."""

    def pause(self) -> None:
        """Close what is open. The rest is done later, or never."""
