"""Limits how many answers run and wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from outrider.server.errors import ApiError

_LONGEST_RETRY = 60  # seconds


@dataclass(eq=False, slots=True)
class QueueEntry:
    """A request in the queue."""

    count: int  # its places
    since: float | None = None  # time.monotonic of its admission; None while it waits
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


class Queue:
    """Lets so many answers run at a time, and so many more wait, first come, first served.

        with queue.entry(request.n or 1) as entry:      # or an error at once
            await entry.admitted.wait()
            ...

    Belongs to one event loop.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running, self._max_waiting = max_running, max_waiting
        self.running = 0
        self._waiting: deque[QueueEntry] = deque()
        self._seconds = 1.0  # that a request has held its places, on average

    @property
    def waiting(self) -> int:
        """Answers in the queue."""
        return sum(entry.count for entry in self._waiting)

    @contextmanager
    def entry(self, count: int) -> Iterator[QueueEntry]:
        """A request with `count` answers, which waits for its places, and gives them up at the end of the block.

        Raises:
            ApiError: with status 429 when the queue is full, and 400 for more places than there are.
        """
        if count > self.max_running:
            message = f"{count} answers are more than this server generates at a time, {self.max_running}."
            message += " Lower n, or send fewer prompts."
            raise ApiError(400, message, param="n", code="invalid_value")
        entry = QueueEntry(count)
        if not self._waiting and self.running + count <= self.max_running:
            self._let_in(entry)
        elif self.waiting + count > self._max_waiting:
            message = f"The server is busy, and the queue is full. Try again in {self._retry_after} s."
            retry = {"Retry-After": str(self._retry_after)}
            raise ApiError(429, message, type="rate_limit_error", code="queue_full", headers=retry)
        else:
            self._waiting.append(entry)
        try:
            yield entry
        finally:
            if entry.since is not None:
                self._seconds += 0.2 * (time.monotonic() - entry.since - self._seconds)
                self.running -= count
            else:
                self._waiting.remove(entry)
            self._admit()  # a smaller request after it may fit

    @asynccontextmanager
    async def places(self, count: int) -> AsyncIterator[None]:
        """Wait for `count` places, and hold them in the block. Raises as `entry`."""
        with self.entry(count) as entry:
            await entry.admitted.wait()
            yield

    def _admit(self) -> None:
        while self._waiting and self.running + self._waiting[0].count <= self.max_running:
            self._let_in(self._waiting.popleft())

    def _let_in(self, entry: QueueEntry) -> None:
        self.running += entry.count
        entry.since = time.monotonic()
        entry.admitted.set()

    @property
    def _retry_after(self) -> int:
        """Seconds until the queue has probably moved on."""
        turns = (self.waiting + 1) / self.max_running
        return min(max(math.ceil(turns * self._seconds), 1), _LONGEST_RETRY)
