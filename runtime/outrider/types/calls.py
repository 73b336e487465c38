"""A model's call, as an observer sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.types.backend import Backend, Chunk


@dataclass(frozen=True, slots=True)
class Call:
    """A call that has ended.

    context: tokens in the cache before it, of the longest sequence. began, submitted: when `submit` began and ended.
    waited, ended: when `wait` began and ended. All four in seconds of `time.perf_counter`. ran: seconds that the device
    was busy within `submit`. busy: the same in all; 0 if the backend does not say. error: why the call failed, or None.
    """

    backend: Backend
    chunks: Seq[Chunk]
    context: int
    began: float
    submitted: float
    waited: float
    ended: float
    ran: float
    busy: float
    error: BaseException | None = None


class CallObserver(Protocol):
    """Is told of models' calls, in the thread that makes them. Must be fast, and must not raise."""

    def called(self, call: Call) -> None:
        """A call has ended, or failed."""
