"""Lets a policy draft an ended answer again, while an engine has nothing else to do."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from outrider.decoding.idle import IdleJob, harmless
from outrider.types import Backend, DraftPolicy


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
