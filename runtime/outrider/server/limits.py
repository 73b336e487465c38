"""Limits of what one request may send, and of how many run and wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope

from outrider.server.errors import ApiError, overloaded

_LONGEST_RETRY = 60  # seconds
_OF_PAGES = (b"origin", b"referer", b"sec-fetch-site")  # headers that browsers send, and programs leave out


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


async def read_body(scope: Scope, receive: Receive, max_bytes: int, seconds: float) -> bytes:
    """A request's body.

    Raises:
        ApiError: with status 415 if a page sends it and does not declare it as JSON, or it is compressed, 413 if it is
            too large, 408 if it does not come.
        Gone: when the client has left.
    """
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json" and not headers.keys().isdisjoint(_OF_PAGES):  # which need not ask for others (CORS)
        raise ApiError(415, "The body must be JSON: set Content-Type to application/json.", code="not_json")
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise ApiError(415, "The body is compressed. Send it without Content-Encoding.", code="compressed")
    too_large = ApiError(413, f"The body is larger than {max_bytes:,} bytes, the limit here.", code="too_large")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError as error:
        raise ApiError(408, f"The body did not arrive within {seconds:g} s.", code="timeout") from error


class Gone(Exception):
    """The client has left: nobody waits for a response."""
