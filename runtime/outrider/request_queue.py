"""Requests of several threads, sharing the calls of one main model."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from outrider.errors import RequestError
from outrider.loop import step
from outrider.results import TextChunk

if TYPE_CHECKING:
    from collections.abc import Generator

    from outrider.request import Request
    from outrider.types import Backend

_AHEAD = 8  # rounds that a request may be ahead of its reader
_PATIENCE = 0.5  # seconds that the worker waits for something to do before it ends


class RequestQueue:
    """Runs requests together, round by round, in a thread of its own.

    So a Ctrl-C, which Python gives to the main thread, never meets a half-done round. The thread begins with the first
    request and ends when there is nothing to do: nothing runs, or nobody reads what does. `_changed` guards what the
    worker and the readers share, which is the queue and each request's published part.
    """

    def __init__(self, main: Backend, max_num_batched_tokens: int) -> None:
        self._main = main
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None

    def run(self, request: Request) -> Generator[TextChunk, None, None]:
        """Bring a request to its end, yielding its text as it becomes certain.

        Raises:
            OutriderError: what the request failed of.
        """
        try:
            with self._changed:
                self._waiting.append(request)
            while True:
                with self._changed:
                    while not request.has_news:
                        self._wake_worker()
                        self._changed.wait()
                    text, done = request.fetch_text(), request.done
                if done and not request.error:
                    yield TextChunk(text, request.stats, request.result())
                    return
                if text:
                    yield TextChunk(text, request.stats)
                if request.error:
                    raise request.error
        finally:
            # The worker takes the slot back. Nothing is locked here, as this may run in garbage collection.
            request.cancelled = True

    def _wake_worker(self) -> None:
        if self._worker is None or not self._worker.is_alive():
            self._worker = threading.Thread(target=self._work, name="outrider")
            self._worker.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._settle()
                # Somebody waits for room, or for text that is not there yet.
                while not self._waiting and all(r.num_rounds_ahead >= _AHEAD for r in self._running):
                    if not self._changed.wait(_PATIENCE):
                        self._worker = None
                        return
                    self._settle()
            self._round()

    def _settle(self) -> None:
        """Between rounds: publish, take the slots of requests that are done with, admit those that wait."""
        for request in (*self._running, *self._waiting):
            request.publish()
        for request in [request for request in self._running if request.done]:
            self._running.remove(request)
            request.release()
        while self._waiting:
            request = self._waiting[0]
            if not request.done and not request.admit(self._main):
                if self._running:
                    break  # their room will do
                request.fail(RequestError("The cache has no room for this request, though nothing else is running."))
                request.publish()
            self._waiting.popleft()
            if not request.done:
                self._running.append(request)
        self._changed.notify_all()

    def _round(self) -> None:
        """One step of the loop, with its time put down to those who were decoding."""
        decoding = [request for request in self._running if request.stats.num_generated_tokens]
        drafters = {request.drafter for request in self._running if request.drafter}
        began, main_began = time.perf_counter(), self._main.seconds
        drafting_began = sum(drafter.seconds for drafter in drafters)
        try:
            step(self._main, self._running, self._max_num_batched_tokens)
        except BaseException as error:
            for request in self._running:
                request.fail(error)
        checking = self._main.seconds - main_began
        drafting = sum(drafter.seconds for drafter in drafters) - drafting_began
        host = time.perf_counter() - began - checking - drafting
        for request in decoding:
            request.stats.check_seconds += checking
            request.stats.draft_seconds += drafting
            request.stats.host_seconds += host
