"""Requests of several threads, sharing the calls of one main model."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from outrider.errors import RequestError
from outrider.forks import check_process
from outrider.loop import step

if TYPE_CHECKING:
    from collections.abc import Generator

    from outrider.request import Request
    from outrider.results import TextChunk
    from outrider.types import Backend

_AHEAD = 8  # rounds that a request may be ahead of its reader


class _Stop:
    """Ends the worker."""


# What the worker is sent: a request to run, None to look around, or the end.
_Inbox: TypeAlias = "SimpleQueue[Request | _Stop | None]"


class RequestQueue:
    """Runs requests together, round by round, in a thread of its own.

    So a Ctrl-C, which Python gives to the main thread, never meets a half-done round. Readers and worker meet in
    `SimpleQueue`s alone, whose operations cannot be interrupted half-way, as those of locks can.
    """

    def __init__(self, main: Backend, max_num_batched_tokens: int) -> None:
        self._pid = os.getpid()
        self._inbox: _Inbox = SimpleQueue()
        self._worker = _Worker(main, max_num_batched_tokens, self._inbox)
        thread = threading.Thread(target=self._worker.work, name="outrider", daemon=True)
        thread.start()
        # When this object goes, or the interpreter ends: a daemon must not die in the middle of a device's call.
        weakref.finalize(self, _stop, self._inbox, thread, self._pid)

    def check_process(self) -> None:
        """Raise RequestError in a process that was forked from the one that has the worker."""
        check_process(self._pid)

    def run_on(self, main: Backend) -> None:
        """Call the main model by way of `main`, its backend or a wrapper of that, from the next round on."""
        self._worker.run_on(main)

    def run(self, request: Request) -> Generator[TextChunk, None, None]:
        """Bring a request to its end, yielding its text as it becomes certain.

        Raises:
            OutriderError: what the request failed of.
            RequestError: in a process that was forked from the one that has the worker.
        """
        self.check_process()
        try:
            self._inbox.put(request)
            while True:
                self.check_process()  # it may have been forked since
                if request.news.empty():
                    self._inbox.put(None)  # the worker may be waiting for a reader
                news = request.news.get()
                if isinstance(news, BaseException):
                    raise news
                yield news
                if news.result:
                    return
        finally:
            # May run in garbage collection, in any thread: SimpleQueue is made for that.
            request.abandoned = True
            self._inbox.put(None)


def _stop(inbox: _Inbox, thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork has no such thread
    inbox.put(_Stop())
    if thread is not threading.current_thread():
        thread.join()


class _Worker:
    """Steps the loop for all requests that were sent to it and are not done."""

    def __init__(self, main: Backend, max_num_batched_tokens: int, inbox: _Inbox) -> None:
        self._main = main
        self._max_num_batched_tokens = max_num_batched_tokens
        self._inbox = inbox
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._refused: Request | None = None  # for want of room, which nobody has given back since

    def run_on(self, main: Backend) -> None:
        self._main = main

    def work(self) -> None:
        while self._receive():
            try:
                self._settle()
                if self._running and not self._is_far_ahead:
                    self._round()
                    self._settle()
            except BaseException as error:  # of an app's drafter, perhaps: nobody shall be left waiting
                self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """End everything with an error."""
        given_up = (*self._running, *self._waiting)
        running, self._running = self._running, []
        self._waiting.clear()
        for request in given_up:
            request.fail(error)  # before it is released: its tokens are not to be kept
        for request in running:
            self._release(request)
        for request in given_up:
            request.publish()

    def _release(self, request: Request) -> None:
        self._refused = None
        try:
            request.release()
        except Exception as error:  # an app's drafter; the request itself is done with
            try:
                warnings.warn(f"A drafter failed to release a sequence: {error!r}.", stacklevel=2)
            except UserWarning as warning:  # an app that has warnings raised
                request.fail(warning)

    @property
    def _is_far_ahead(self) -> bool:
        """Whether nobody waits: neither for room, nor for text that is not there yet."""
        return not self._waiting and all(request.news.qsize() >= _AHEAD for request in self._running)

    def _receive(self) -> bool:
        """Take what has been sent, waiting for it if there is nothing else to do; False at the end."""
        while self._is_far_ahead or not self._inbox.empty():
            sent = self._inbox.get()
            if isinstance(sent, _Stop):
                return False
            if sent is not None:
                self._waiting.append(sent)
                continue
            if any(request.abandoned for request in self._running):
                break
        return True

    def _settle(self) -> None:
        """Between rounds: publish, take the slots of requests that are done with, admit those that wait."""
        for request in (*self._running, *self._waiting):
            # Who hears that a request has ended may count on its room.
            if request.ended:
                self._leave(request)
            request.publish()
            if request.done:  # of the tokenizer's error; asked once more, it might have been cancelled since
                self._leave(request)
        while self._waiting:
            request = self._waiting[0]
            if not request.done and (request is self._refused or not self._admit(request)):
                if self._running and not request.error:
                    self._refused = request
                    break  # their room will do
                request.fail(RequestError("The cache has no room for this request, though nothing else is running."))
                request.publish()
            self._waiting.popleft()
            if not request.done:
                self._running.append(request)

    def _leave(self, request: Request) -> None:
        if request in self._running:
            self._running.remove(request)
            self._release(request)

    def _admit(self, request: Request) -> bool:
        try:
            return request.admit(self._main)
        except Exception as error:  # an app's drafter
            request.fail(error)
            return False

    def _round(self) -> None:
        """One step of the loop, with its time put down to those who were decoding."""
        decoding = [request for request in self._running if request.stats.num_generated_tokens]
        drafters = {id(r.drafter): r.drafter for r in self._running if r.drafter is not None}.values()
        began, main_began = time.perf_counter(), self._main.seconds
        drafting_began = sum(drafter.seconds for drafter in drafters)
        ahead = {id(r.ahead_drafter): r.ahead_drafter for r in self._running if r.ahead_drafter is not None}.values()
        ahead_began = sum(drafter.ahead_seconds for drafter in ahead)
        try:
            step(self._main, self._running, self._max_num_batched_tokens)
        except BaseException as error:  # of the models' calls, which all requests share
            for request in self._running:
                request.fail(error)
        checking = self._main.seconds - main_began
        drafting = sum(drafter.seconds for drafter in drafters) - drafting_began
        ahead_seconds = sum(drafter.ahead_seconds for drafter in ahead) - ahead_began
        host = time.perf_counter() - began - checking - drafting
        for request in decoding:
            request.stats.check_seconds += checking
            request.stats.draft_seconds += drafting
            request.stats.ahead_seconds += ahead_seconds
            request.stats.host_seconds += host
