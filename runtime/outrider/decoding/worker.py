"""The engine's thread: it steps the loop for the requests that it is sent, and does what is left while it has none."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from queue import Empty, SimpleQueue
from typing import TypeAlias

from outrider.decoding.drafting import seconds_of
from outrider.decoding.loop import step
from outrider.decoding.observer import Observer
from outrider.decoding.prefix_check import PrefixCheck
from outrider.decoding.request import Request
from outrider.decoding.rereading import Rereading
from outrider.decoding.results import TextChunk
from outrider.decoding.scheduler import Scheduler
from outrider.decoding.slots import admit, release
from outrider.errors import EngineClosed, RequestError
from outrider.models.kv import PrefixStore
from outrider.models.tuning.retiming import Retiming
from outrider.types import Backend

_REST = 0.1  # seconds without a request, before ended answers are read again
_AHEAD = 8  # rounds that a request may be ahead of its reader


class Stop:
    """Ends the worker."""


class Settle(threading.Event):
    """Makes the worker do at once what it does while it is idle, unless it is not. Is set when that is done."""


News: TypeAlias = "TextChunk | BaseException"
# Messages to the worker: a request to run, None to wake up, or the end.
Inbox: TypeAlias = "SimpleQueue[Request | Stop | Settle | None]"


class Worker:
    """Steps the loop for all requests that were sent to it and are not done."""

    def __init__(
        self,
        main: Backend,
        scheduler: Scheduler,
        inbox: Inbox,
        prefixes: PrefixStore | None,
        retiming: Retiming | None = None,
    ) -> None:
        self.main: Backend | None = main
        self._prefixes = prefixes
        self.observer: Observer | None = None
        self._scheduler = scheduler
        self._inbox = inbox
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._refused: Request | None = None  # there was no room for it, and none was freed since
        self._rereading, self.prefix_check = Rereading(), PrefixCheck(prefixes)
        self._retiming = Retiming({}) if retiming is None else retiming

    def work(self) -> None:
        """Run until the end comes: what the thread does."""
        while True:
            try:
                if not self._receive():
                    break
                self._settle()
                if self.main and self._running and not self._is_far_ahead:
                    self._round(self.main)
                    self._settle()
                    if self._prefixes is not None and self._prefixes.is_due:
                        self._prefixes.copy_on()
            except BaseException as error:  # such as an app's drafter's: every reader must get an error
                self.give_up(error)
        self.give_up(EngineClosed())
        self._retiming.pause()
        self._retiming.save()
        if self._prefixes is not None:
            self._prefixes.finish()

    def give_up(self, error: BaseException) -> None:
        """End all requests with an error."""
        stop: Stop | None = None
        while not self._inbox.empty():
            sent = self._inbox.get()
            if isinstance(sent, Settle):
                sent.set()
            elif isinstance(sent, Stop):
                stop = sent
            elif sent is not None:
                self._waiting.append(sent)
        if stop is not None:  # whoever closes the engine waits for its end
            self._inbox.put(stop)
        given_up = (*self._running, *self._waiting)
        running, self._running = self._running, []
        self._waiting.clear()
        for request in given_up:
            request.fail(error)  # before it is released, so that its tokens are not published
        for request in running:
            self._release(request)
        for request in given_up:
            self._publish(request)

    def _release(self, request: Request) -> None:
        self._refused = None
        try:
            release(request)
            if self.main and self.main.capabilities.marks_answers and request.reuse and not request.error:
                self._rereading.add(request.sequence)
        except BaseException as error:  # whatever it is: the request itself has ended, and its reader waits
            try:
                warnings.warn(f"A drafter failed to release a sequence: {error!r}.", stacklevel=2)
            except BaseException as warning:  # if the app turns warnings into errors, or has its own `showwarning`
                request.fail(warning)

    @property
    def _is_far_ahead(self) -> bool:
        """Whether no request waits for room, and no reader waits for text."""
        return not self._waiting and all(request.sink.qsize() >= _AHEAD for request in self._running)

    def _receive(self) -> bool:
        """Take messages from the inbox. Waits if there is nothing else to do. False at the end."""
        while self._is_far_ahead or not self._inbox.empty():
            try:
                sent = self._inbox.get(timeout=self._rest)
            except Empty:
                self._use_rest()
                continue
            if isinstance(sent, Stop):
                return False
            if isinstance(sent, Settle):
                self._retiming.pause()  # until the next request: somebody measures
                while self._rest is not None:
                    self._use_rest()
                sent.set()
            elif sent is not None:
                self._waiting.append(sent)
                self._rereading.pause()  # it may begin with what was read
                self.prefix_check.pause()
                self._retiming.pause()
                continue
            if any(request.abandoned for request in self._running):
                break
        return True

    @property
    def _rest(self) -> float | None:
        """Seconds to wait for messages before there is something else to do; None if there is nothing."""
        if self.main is None or self._running or self._waiting:
            return None
        if self._prefixes is not None and self._prefixes.is_due:
            return 0.0
        job = next((job for job in (self._rereading, self.prefix_check) if job.is_due), None)
        if job is None:
            return self._retiming.rest
        return 0.0 if job.has_begun else _REST

    def _use_rest(self) -> None:
        """Copy a part of a prefix cache for its file, read a part of an ended answer again, or check a prefix."""
        if self._prefixes is not None and self._prefixes.is_due:
            self._prefixes.copy_on()
        elif self.main is not None and self._rereading.is_due:
            self._rereading.read_on(self.main)
        elif self.main is not None and self.prefix_check.is_due:
            self.prefix_check.check_on(self.main)
        elif self._retiming.rest == 0:
            self._retiming.go_on()

    def _settle(self) -> None:
        """Between rounds: send texts, release ended requests, admit waiting ones."""
        for request in (*self._running, *self._waiting):
            request.end_if_cancelled()
            # Release first: a reader that is told of the end may rely on the room.
            if request.ended:
                self._leave(request)
            self._publish(request)
            if request.done:  # a tokenizer error may have ended it
                self._leave(request)
        while self._waiting:
            request = self._waiting[0]
            if not request.done and (request is self._refused or not self._admit(request)):
                if self._running and not request.error:
                    self._refused = request
                    break  # there is room once these have ended
                request.fail(
                    RequestError("The cache is too small for this request, although no other request is running.")
                )
                self._publish(request)
            self._waiting.popleft()
            if not request.done:
                self._running.append(request)

    def _publish(self, request: Request) -> None:
        """Send a request's news. The observer is told first that it has ended."""
        has_ended, observer = request.ended, self.observer
        if has_ended and observer is not None:
            observer.left(request)
        request.publish()
        if request.done and not has_ended and observer is not None:  # a tokenizer error has ended it
            observer.left(request)

    def forget(self, observer: object) -> None:
        """Tell an observer that has failed no more."""
        if self.observer is observer:
            self.observer = None

    def _leave(self, request: Request) -> None:
        if request in self._running:
            self._running.remove(request)
            self._release(request)
            if not self._running:
                self._retiming.answered()

    def _admit(self, request: Request) -> bool:
        try:
            admitted = self.main is not None and admit(request, self.main)
        except Exception as error:  # an app's drafter's
            request.fail(error)
            return False
        if admitted:
            self.prefix_check.note(request.sequence, request.stats.num_cached_tokens)
        if admitted and (observer := self.observer) is not None:
            observer.admitted(request)
        return admitted

    def _round(self, main: Backend) -> None:
        """One step of the loop. Its time counts for all requests that were decoding."""
        decoding = [request for request in self._running if request.stats.num_generated_tokens]
        began, main_began = time.perf_counter(), main.seconds
        drafting_began = seconds_of(self._running)
        running = [request for request in self._running if not request.ended]
        try:
            if running:
                step(main, running, self._scheduler, self.observer)
        except BaseException as error:  # an error in the models' calls, which all requests share
            for request in running:
                request.fail(error)
        checking = main.seconds - main_began
        taken = [(drafting_began[key], now) for key, now in seconds_of(running).items()]
        drafting = sum(now - before for (before, _), (now, _) in taken)
        ahead_seconds = sum(now - before for (_, before), (_, now) in taken)
        took = time.perf_counter() - began
        host = took - checking - drafting
        for request in decoding:
            request.stats.check_seconds += checking
            request.stats.draft_seconds += drafting
            request.stats.ahead_seconds += ahead_seconds
            request.stats.host_seconds += host
        if decoding:
            self._retiming.spent(took)
