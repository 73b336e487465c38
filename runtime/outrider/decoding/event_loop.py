"""Reads an answer's text in an event loop of asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from queue import SimpleQueue
from threading import Event
from typing import TypeVar

from outrider.decoding.answer import Answer
from outrider.decoding.delivery import Delivery
from outrider.decoding.request_queue import RequestQueue
from outrider.decoding.results import TextChunk
from outrider.errors import EngineClosed

T = TypeVar("T")


async def run(queue: RequestQueue, answer: Answer) -> AsyncGenerator[TextChunk, None]:
    """Run an answer to its end, and yield its text as it comes; as `RequestQueue.run`.

    Closing the generator, or cancelling the task that waits for it, ends the answer.

    Raises:
        OutriderError: when the answer fails.
    """
    queue.check_may_wait()
    news_of_it = answer.delivery.sink = _LoopQueue(answer.delivery)
    try:
        queue.submit(answer)
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
        queue.cancel(answer)


async def call(thread: Executor | None, function: Callable[[Event], T]) -> T:
    """Call a function in a thread, by default one of the event loop's. Its event is set if the task is cancelled.

    Raises:
        EngineClosed: when the engine is closed, and its thread with it, before the function was begun.
    """
    gone = Event()
    try:
        called = asyncio.get_running_loop().run_in_executor(thread, function, gone)
    except RuntimeError as error:  # the thread takes nothing any more
        raise EngineClosed from error
    try:
        return await called
    except asyncio.CancelledError as error:
        gone.set()
        task = asyncio.current_task()
        if task is not None and not task.cancelling():  # closing has cancelled the call
            raise EngineClosed from error
        raise


class _LoopQueue:
    """A sink that the worker fills, and that a task of the running event loop empties."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._loop = asyncio.get_running_loop()
        self._news: SimpleQueue[TextChunk | BaseException] = SimpleQueue()
        self._came = asyncio.Event()

    def put(self, news: TextChunk | BaseException, /) -> None:
        """Take a piece, in the worker's thread."""
        self._news.put(news)
        try:
            self._loop.call_soon_threadsafe(self._came.set)
        except RuntimeError:  # the event loop is closed: nobody reads any more
            self._delivery.abandoned = True

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
