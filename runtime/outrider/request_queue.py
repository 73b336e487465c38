"""Requests of several threads, sharing the calls of one main model."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from outrider.loop import step
from outrider.results import TextChunk

if TYPE_CHECKING:
    from collections.abc import Generator

    from outrider.request import Request
    from outrider.types import Backend


class RequestQueue:
    """Steps all requests that run, in whichever of their threads has nothing else to do.

    There is no thread of its own: a thread that waits for text takes the lead, makes one round for everybody, and
    wakes the others. So a request goes on only while somebody waits for something, and one that is waiting for room in
    the cache moves the others along until they give theirs back.
    """

    def __init__(self, main: Backend, max_num_batched_tokens: int) -> None:
        self._main = main
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._turn = threading.Condition()
        self._led = False

    def run(self, request: Request) -> Generator[TextChunk, None, None]:
        """Bring a request to its end, yielding its text as it becomes certain."""
        self._waiting.append(request)
        try:
            while not request.finish_reason:
                self._await_text(request)
                if not request.finish_reason and (text := request.fetch_text()):
                    yield TextChunk(text, request.stats)
            yield TextChunk(request.fetch_text(), request.stats, request.result())
        finally:
            # Whoever leads next takes the slot back. Nothing is locked here, as this may run in garbage collection.
            request.cancelled = True

    def _await_text(self, request: Request) -> None:
        with self._turn:
            while self._led and not request.has_news:
                self._turn.wait()
            if request.has_news:
                return
            self._led = True
        try:
            self._round()
        finally:
            with self._turn:
                self._led = False
                self._turn.notify_all()

    def _round(self) -> None:
        self._sweep()
        self._admit()
        decoding = [request for request in self._running if request.stats.num_generated_tokens]
        began, main_began = time.perf_counter(), self._main.seconds
        drafters = {request.drafter for request in self._running if request.drafter}
        drafting_began = sum(drafter.seconds for drafter in drafters)
        step(self._main, self._running, self._max_num_batched_tokens)
        in_main = self._main.seconds - main_began
        in_drafts = sum(drafter.seconds for drafter in drafters) - drafting_began
        host = time.perf_counter() - began - in_main - in_drafts
        for request in decoding:
            request.stats.check_seconds += in_main
            request.stats.host_seconds += host
        self._sweep()

    def _admit(self) -> None:
        """Give waiting requests their place in the caches, in order, while there is room."""
        while self._waiting:
            request = self._waiting[0]
            if not request.cancelled and not request.admit(self._main):
                return
            self._waiting.popleft()
            if not request.cancelled:
                self._running.append(request)

    def _sweep(self) -> None:
        """Take the slots of requests that are done with."""
        for request in [request for request in self._running if request.cancelled or request.finish_reason]:
            request.finish("cancelled")  # keeps an earlier reason
            request.release()
            self._running.remove(request)
