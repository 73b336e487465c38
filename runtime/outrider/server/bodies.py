"""Bodies of requests: how they come, and where they are read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive, Scope

from outrider.server.errors import ApiError
from outrider.server.settings import Settings

_OF_PAGES = (b"origin", b"referer", b"sec-fetch-site")  # headers that browsers send, and programs leave out
_MOST_AT_ONCE = 1 << 15  # bytes, which take some milliseconds
_NUM_THREADS = 2

Made = TypeVar("Made")


class Bodies:
    """Receives bodies, and has them read: large ones in threads, so that others are served meanwhile.

        asked = await bodies.read(scope, receive, partial(read_request, kind=ChatRequest))

    What reads a body of 4 MB takes some seconds at most, and some 100 MB; so many at a time are read as there are
    threads, and the others wait.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "outrider-bodies")

    async def read(self, scope: Scope, receive: Receive, work: Callable[[bytes], Made]) -> Made:
        """What `work` makes of the body. It may run in a thread.

        Raises:
            ApiError: with status 415 if a page sends it and does not declare it as JSON, or it is compressed, 413 if it
                is too large, 408 if it does not come; and what `work` raises.
            Gone: when the client has left.
        """
        body = await _received(scope, receive, self._settings.max_body, self._settings.body_seconds)
        if len(body) <= _MOST_AT_ONCE:
            return work(body)
        return await unless_gone(asyncio.get_running_loop().run_in_executor(self._threads, work, body), receive)


async def _received(scope: Scope, receive: Receive, max_bytes: int, seconds: float) -> bytes:
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


async def unless_gone(work: Awaitable[Made], receive: Receive) -> Made:
    """What the work gives, unless the client leaves before.

    Raises:
        Gone: when the client has left.
    """
    tasks = working, _ = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
