"""The engine's thread: it steps the loop for the answers that it is sent, and does what is left while it has none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeAlias

from outrider.decoding.answer import Answer, isolated
from outrider.decoding.drafting import seconds_of
from outrider.decoding.idle import IdleJob
from outrider.decoding.loop import step
from outrider.decoding.results import TextChunk
from outrider.decoding.scheduler import Scheduler
from outrider.errors import EngineClosed
from outrider.types import Backend


class Stop:
    """Ends the worker."""


class Settle(threading.Event):
    """Makes the worker do at once what it does while it is idle, unless it is not. Is set when that is done.

    drafts_until: only draft the ended answer again, where a draft model is unknown, until this time. Otherwise that is
    left out.
    """

    def __init__(self, drafts_until: float | None = None) -> None:
        super().__init__()
        self.drafts_until = drafts_until


class WorkerCall:
    """A function that the worker is to call between two rounds."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function


News: TypeAlias = "TextChunk | BaseException"
# Messages to the worker: an answer to run, None to wake up, something to do, or the end.
Inbox: TypeAlias = "SimpleQueue[Answer | Stop | Settle | WorkerCall | None]"


class Worker:
    """Steps the loop for all answers that were sent to it and are not done.

    jobs: what it does while it has none, the most urgent first.
    """

    def __init__(self, scheduler: Scheduler, inbox: Inbox, jobs: Sequence[IdleJob] = ()) -> None:
        self.scheduler = scheduler
        self._inbox = inbox
        self._jobs = jobs
        self._idle_since = time.monotonic()
        self._is_measured = False  # by somebody else, until the next request

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
            except BaseException as error:  # such as an app's drafter's: every reader must get an error
                self.give_up(error)
        self.give_up(EngineClosed())
        for job in self._jobs:
            if job.measures:
                job.pause()
        for job in self._jobs:
            job.finish()

    def give_up(self, error: BaseException) -> None:
        """End all answers with an error."""
        stop: Stop | None = None
        while not self._inbox.empty():
            sent = self._inbox.get()
            if isinstance(sent, Settle):
                sent.set()
            elif isinstance(sent, Stop):
                stop = sent
            elif sent is not None and not isinstance(sent, WorkerCall):
                self.scheduler.waiting.append(sent)
        if stop is not None:  # whoever closes the engine waits for its end
            self._inbox.put(stop)
        self.scheduler.give_up(error)

    def _settle(self) -> None:
        was_running = bool(self.scheduler.running)
        self.scheduler.settle()
        if was_running and not self.scheduler.running:
            self._idle_since = time.monotonic()
            for job in self._jobs:
                job.answered()

    def _receive(self) -> bool:
        """Take messages from the inbox, and settle. Waits if there is nothing else to do. False at the end."""
        scheduler, has_news = self.scheduler, False
        while scheduler.is_far_ahead or not self._inbox.empty():
            wait, job = self._next
            try:
                sent = self._inbox.get(timeout=wait)
            except Empty:
                self._use_rest(job)
                continue
            has_news = True
            if isinstance(sent, Stop):
                return False
            if isinstance(sent, Settle):
                if sent.drafts_until is None:
                    self._finish_jobs()
                elif self._draft_again(sent.drafts_until):
                    self._inbox.put(sent)  # other messages come first
                    continue
                sent.set()
            elif isinstance(sent, WorkerCall):
                sent.function()
            elif sent is not None:
                self._is_measured = False
                scheduler.waiting.append(sent)
                for each in self._jobs:  # it may begin with what was read
                    each.pause()
                continue
            if any(answer.delivery.abandoned for answer in scheduler.running):
                break
        if has_news:
            self._settle()
        return True

    def _finish_jobs(self) -> None:
        """Do all that is due, but for what measures: somebody else does so until the next request."""
        self._is_measured = True
        for job in self._jobs:
            if job.measures:
                job.pause()
        while (due := self._next[1]) is not None:
            self._use_rest(due)

    def _draft_again(self, until: float) -> bool:
        """Make the next draft of the answer that ended last. Returns whether there are more to make."""
        scheduler = self.scheduler
        if scheduler.main is None or scheduler.running or scheduler.waiting or time.monotonic() > until:
            return False
        if scheduler.replaying.is_due:
            scheduler.replaying.go_on(scheduler.main, lambda: False)
        return scheduler.replaying.is_due

    @property
    def _next(self) -> tuple[float | None, IdleJob | None]:
        """The job that is due next, and the seconds until then, in which a message may come; None if there is none."""
        scheduler = self.scheduler
        if scheduler.main is None or scheduler.running or scheduler.waiting:
            return None, None
        idle = time.monotonic() - self._idle_since
        first: tuple[float | None, IdleJob | None] = None, None
        for job in self._jobs:
            rest = None if job.measures and self._is_measured else job.rest
            if rest is not None and (first[0] is None or max(rest - idle, 0.0) < first[0]):
                first = max(rest - idle, 0.0), job
        return first

    def _use_rest(self, job: IdleJob | None) -> None:
        """Do a part of a job."""
        if job is not None and self.scheduler.main is not None:
            job.go_on(self.scheduler.main, lambda: not self._inbox.empty())

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
        for job in self._jobs if decoding else ():
            job.spent(took)
