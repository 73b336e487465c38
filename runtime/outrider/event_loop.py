"""Reads a request's text in an event loop of asyncio."""

from __future__ import annotations

import asyncio
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from outrider.request import Request
    from outrider.request_queue import RequestQueue
    from outrider.results import TextChunk


async def run(queue: RequestQueue, request: Request) -> AsyncGenerator[TextChunk, None]:
    """Run a request to its end, and yield its text as it comes; as `RequestQueue.run`.

    Closing the generator, or cancelling the task that waits for it, ends the answer.

    Raises:
        OutriderError: when the request fails.
    """
    news_of_it = request.sink = _LoopQueue(request)
    try:
        queue.submit(request)
        while True:
            if not news_of_it.qsize():
                queue.wake()  # the worker may be waiting for a reader
            news = await news_of_it.get()
            if isinstance(news, BaseException):
                raise news
            yield news
            if news.result:
                return
    finally:
        queue.cancel(request)


class _LoopQueue:
    """A sink that the worker fills, and that a task of the running event loop empties."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._news: SimpleQueue[TextChunk | BaseException] = SimpleQueue()
        self._came = asyncio.Event()

    def put(self, news: TextChunk | BaseException, /) -> None:
        """Take a piece, in the worker's thread."""
        self._news.put(news)
        try:
            self._loop.call_soon_threadsafe(self._came.set)
        except RuntimeError:  # the event loop is closed: nobody reads any more
            self._request.abandoned = True

    def qsize(self) -> int:
        """Pieces that were not read yet."""
        return self._news.qsize()

    async def get(self) -> TextChunk | BaseException:
        """The next piece."""
        while self._news.empty():
            self._came.clear()
            if self._news.empty():  # what comes from here on sets the event again
                await self._came.wait()
        return self._news.get_nowait()
