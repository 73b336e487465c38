"""A model's call, as somebody sees it who watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.types.backend import Backend, Chunk


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is over.

    context: tokens in the cache before it, of the longest sequence. began, submitted: when `submit` began and ended;
    waited, ended: when `wait` did; in seconds of `time.perf_counter`. ran: seconds for which the device was busy within
    `submit`; busy: in all, 0 where the backend does not say. error: what the call failed of.
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
    """Hears of models' calls, in the thread that makes them. Must not raise, nor take long."""

    def called(self, call: Call) -> None:
        """A call is over."""
