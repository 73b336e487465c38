"""What an engine does while no request runs, a part at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from outrider.models.kv import PrefixStore
from outrider.types import Backend, DraftPolicy

log = logging.getLogger("outrider")


@contextmanager
def harmless(fault: str) -> Iterator[None]:
    """Log what is raised within, after these words: no request depends on a job."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %r", fault, error)


class IdleJob:
    """A job for the time without requests. Its methods never raise, and run in the thread that makes the models' calls.

    while job.rest == 0.0:
        job.go_on(main, is_cancelled)
    job.pause()    # a request has come
    """

    patience: float = 0.1  # seconds without a request, before it begins
    measures: bool = False  # whether it times or tries something: it leaves the models to whoever else measures

    @property
    def is_due(self) -> bool:
        """Whether there is something to do."""
        return False

    @property
    def has_begun(self) -> bool:
        """Whether it is partly done, perhaps in a slot that is still open."""
        return False

    @property
    def rest(self) -> float | None:
        """Seconds without a request, before its next part; None: there is nothing to do."""
        return None if not self.is_due else 0.0 if self.has_begun else self.patience

    def go_on(self, main: Backend, is_cancelled: Callable[[], bool]) -> None:
        """Do the next part, about as long as a call. is_cancelled: whether somebody waits for the end of it."""

    def pause(self) -> None:
        """Close what is open. The rest is done later, or never."""

    def answered(self) -> None:
        """Take notice that the last answer has ended."""

    def spent(self, seconds: float) -> None:
        """Take notice of a round of answers, which took so long."""

    def finish(self) -> None:
        """End: the engine is closed."""


class CopyingPrefixes(IdleJob):
    """Copies prefix caches for their files, a chunk at a time: also after each round of answers."""

    patience = 0.0

    def __init__(self, store: PrefixStore) -> None:
        self._store = store

    @property
    def is_due(self) -> bool:
        """Whether there is something to copy."""
        return self._store.is_due

    def go_on(self, main: Backend, is_cancelled: Callable[[], bool]) -> None:  # noqa: ARG002
        """Copy a chunk."""
        self._store.copy_on()

    def spent(self, seconds: float) -> None:  # noqa: ARG002
        """Copy a chunk between two rounds."""
        if self._store.is_due:
            self._store.copy_on()

    def finish(self) -> None:
        """Save what is left."""
        self._store.finish()


class Replaying(IdleJob):
    """Has the policy of the answer that ended last draft that again (`DraftPolicy.replay`)."""

    measures = True

    def __init__(self) -> None:
        self._policy: DraftPolicy | None = None
        self._job: Iterator[None] | None = None

    @property
    def is_due(self) -> bool:
        """Whether there may be something to draft."""
        return self._policy is not None

    @property
    def has_begun(self) -> bool:
        """Whether an answer is partly drafted, in a slot that is still open."""
        return self._job is not None

    def add(self, policy: DraftPolicy) -> None:
        """An answer of this policy has ended."""
        self._policy = policy

    def go_on(self, main: Backend, is_cancelled: Callable[[], bool]) -> None:  # noqa: ARG002
        """Make the next draft."""
        with harmless("An answer could not be drafted again"):
            if self._job is None and self._policy is not None:
                self._job = iter(self._policy.replay(is_cancelled))
            if self._job is not None and next(self._job, True) is None:
                return
        self._policy = self._job = None

    def pause(self) -> None:
        """End what has begun. It begins anew after the next answer."""
        job, self._job, self._policy = self._job, None, None
        with harmless("What was drafted again of an answer could not be dropped"):
            if isinstance(job, Generator):
                job.close()
