"""The engine's thread: it steps the loop for the answers that it is sent, and does what is left while it has none."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import TypeAlias

from outrider.decoding.answer import Answer, isolated
from outrider.decoding.drafting import seconds_of
from outrider.decoding.idle import IdleJob
from outrider.decoding.loop import step
from outrider.decoding.results import TextChunk
from outrider.decoding.scheduler import Scheduler
from outrider.errors import EngineClosed
from outrider.models.kv import PrefixStore
from outrider.models.tuning.retiming import Retiming
from outrider.types import Backend

_IDLE_SECONDS = 0.1  # seconds without a request, before ended answers are read again


class Stop:
    """Ends the worker."""


class Settle(threading.Event):
    """Makes the worker do at once what it does while it is idle, unless it is not. Is set when that is done."""


News: TypeAlias = "TextChunk | BaseException"
# Messages to the worker: an answer to run, None to wake up, or the end.
Inbox: TypeAlias = "SimpleQueue[Answer | Stop | Settle | None]"


class Worker:
    """Steps the loop for all answers that were sent to it and are not done."""

    def __init__(
        self, scheduler: Scheduler, inbox: Inbox, prefixes: PrefixStore | None, retiming: Retiming | None = None
    ) -> None:
        self.scheduler = scheduler
        self._inbox = inbox
        self._prefixes = prefixes
        self._retiming = Retiming({}) if retiming is None else retiming

    def work(self) -> None:
        """Run until the end comes: what the thread does."""
        scheduler = self.scheduler
        while True:
            try:
                if not self._receive():
                    break
                if scheduler.main and scheduler.running:
                    self._round(scheduler.main)
                    self._settle()
                    if self._prefixes is not None and self._prefixes.is_due:
                        self._prefixes.copy_on()
            except BaseException as error:  # such as an app's drafter's: every reader must get an error
                self.give_up(error)
        self.give_up(EngineClosed())
        scheduler.replaying.pause()
        self._retiming.pause()
        self._retiming.save()
        if self._prefixes is not None:
            self._prefixes.finish()

    def give_up(self, error: BaseException) -> None:
        """End all answers with an error."""
        stop: Stop | None = None
        while not self._inbox.empty():
            sent = self._inbox.get()
            if isinstance(sent, Settle):
                sent.set()
            elif isinstance(sent, Stop):
                stop = sent
            elif sent is not None:
                self.scheduler.waiting.append(sent)
        if stop is not None:  # whoever closes the engine waits for its end
            self._inbox.put(stop)
        self.scheduler.give_up(error)

    def _settle(self) -> None:
        was_running = bool(self.scheduler.running)
        self.scheduler.settle()
        if was_running and not self.scheduler.running:
            self._retiming.answered()

    def _receive(self) -> bool:
        """Take messages from the inbox, and settle. Waits if there is nothing else to do. False at the end."""
        scheduler, has_news = self.scheduler, False
        while scheduler.is_far_ahead or not self._inbox.empty():
            try:
                sent = self._inbox.get(timeout=self._rest)
            except Empty:
                self._use_rest()
                continue
            has_news = True
            if isinstance(sent, Stop):
                return False
            if isinstance(sent, Settle):
                scheduler.replaying.pause()  # until the next request: somebody measures
                self._retiming.pause()
                while self._rest is not None:
                    self._use_rest()
                sent.set()
            elif sent is not None:
                scheduler.waiting.append(sent)
                for job in scheduler.idle_jobs:  # it may begin with what was read
                    job.pause()
                self._retiming.pause()
                continue
            if any(answer.delivery.abandoned for answer in scheduler.running):
                break
        if has_news:
            self._settle()
        return True

    @property
    def _rest(self) -> float | None:
        """Seconds to wait for messages before there is something else to do; None if there is nothing."""
        scheduler = self.scheduler
        if scheduler.main is None or scheduler.running or scheduler.waiting:
            return None
        if self._prefixes is not None and self._prefixes.is_due:
            return 0.0
        if (job := self._job) is None:
            return self._retiming.rest
        return 0.0 if job.has_begun else _IDLE_SECONDS

    @property
    def _job(self) -> IdleJob | None:
        """What is to be done next while nothing runs."""
        return next((job for job in self.scheduler.idle_jobs if job.is_due), None)

    def _use_rest(self) -> None:
        """Copy a part of a prefix cache for its file, do a part of a job, or time calls again."""
        main = self.scheduler.main
        if self._prefixes is not None and self._prefixes.is_due:
            self._prefixes.copy_on()
        elif main is not None and (job := self._job) is not None:
            job.go_on(main, lambda: not self._inbox.empty())
        elif self._retiming.rest == 0:
            self._retiming.go_on()

    def _round(self, main: Backend) -> None:
        """One step of the loop. Its time counts for all answers that were decoding."""
        scheduler = self.scheduler
        decoding = [answer for answer in scheduler.running if answer.decodes]
        began, main_began = time.perf_counter(), main.seconds
        drafting_began = seconds_of(scheduler.running)
        with isolated(*(answer for answer in scheduler.running if not answer.ended)):  # they share the models' calls
            step(main, scheduler, scheduler.observer)
        checking = main.seconds - main_began
        taken = [(drafting_began[key], now) for key, now in seconds_of(scheduler.running).items()]
        drafting = sum(now - before for (before, _), (now, _) in taken)
        ahead_seconds = sum(now - before for (_, before), (_, now) in taken)
        took = time.perf_counter() - began
        host = took - checking - drafting
        for answer in decoding:
            answer.stats.check_seconds += checking
            answer.stats.draft_seconds += drafting
            answer.stats.ahead_seconds += ahead_seconds
            answer.stats.host_seconds += host
        if decoding:
            self._retiming.spent(took)
