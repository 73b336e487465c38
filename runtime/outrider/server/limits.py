"""Limits how many answers run and wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.server.errors import ApiError, overloaded

_LONGEST_RETRY = 60  # seconds


class Queue:
    """Lets so many answers run at a time, and so many more wait, first come, first served.

        async with queue.places(request.n or 1):
            ...

    Belongs to one event loop.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running, self._max_waiting = max_running, max_waiting
        self.running = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._seconds = 1.0  # that a request has held its places, on average

    @property
    def waiting(self) -> int:
        """Answers in the queue."""
        return sum(count for count, _ in self._waiting)

    @asynccontextmanager
    async def places(self, count: int) -> AsyncIterator[None]:
        """Wait for `count` places, and hold them in the block.

        Raises:
            ApiError: with status 429 when the queue is full, and 400 for more places than there are.
        """
        await self._enter(count)
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds += 0.2 * (time.monotonic() - began - self._seconds)
            self._leave(count)

    async def _enter(self, count: int) -> None:
        if count > self.max_running:
            message = f"{count} answers are more than this server generates at a time, {self.max_running}."
            message += " Lower n, or send fewer prompts."
            raise ApiError(400, message, param="n", code="invalid_value")
        if not self._waiting and self.running + count <= self.max_running:
            self.running += count
            return
        if self.waiting + count > self._max_waiting:
            raise overloaded(self._retry_after)
        place = (count, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        try:
            await place[1]
        except asyncio.CancelledError:
            if not place[1].cancelled():  # it was admitted at the same time
                self._leave(count)
            elif place in self._waiting:
                self._waiting.remove(place)
                self._admit()  # a smaller request after it may fit
            raise

    def _leave(self, count: int) -> None:
        self.running -= count
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.running + self._waiting[0][0] <= self.max_running:
            count, admitted = self._waiting.popleft()
            if not admitted.cancelled():
                self.running += count
                admitted.set_result(None)

    @property
    def _retry_after(self) -> int:
        """Seconds until the queue has probably moved on."""
        turns = (self.waiting + 1) / self.max_running
        return min(max(math.ceil(turns * self._seconds), 1), _LONGEST_RETRY)
