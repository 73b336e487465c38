"""Runs the requests of several threads together, on one main model."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from functools import partial
from queue import SimpleQueue

from outrider.decoding.answer import Answer
from outrider.decoding.idle import CopyingPrefixes, IdleJob
from outrider.decoding.observer import Observer, guarded
from outrider.decoding.prefix_check import PrefixCheck
from outrider.decoding.results import TextChunk
from outrider.decoding.row_budget import RowBudget
from outrider.decoding.scheduler import Scheduler
from outrider.decoding.worker import Inbox, News, Settle, Stop, Worker, WorkerCall
from outrider.errors import EngineClosed, RequestError
from outrider.models.cost.table import CallCost
from outrider.models.kv import PrefixStore
from outrider.system.processes import check_process
from outrider.types import Backend

log = logging.getLogger("outrider")


class RequestQueue:
    """Runs requests together, round by round, in a thread of its own.

    So Ctrl-C, which Python delivers to the main thread, never interrupts a round. Readers and worker share only
    `SimpleQueue`s, whose operations cannot be interrupted half-way, as those of locks can. prefixes: copies a part of
    the prefix caches after each round, and while no request runs. jobs: what else is done then, the most urgent first.
    cost: of the main model's calls, which teach it.
    """

    def __init__(
        self,
        main: Backend,
        rows: RowBudget,
        prefixes: PrefixStore | None = None,
        jobs: Sequence[IdleJob] = (),
        cost: CallCost | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._inbox: Inbox = SimpleQueue()
        self._scheduler = Scheduler(main, rows, cost=cost, prefix_check=PrefixCheck(prefixes))
        copying = [] if prefixes is None else [CopyingPrefixes(prefixes)]
        self._worker = Worker(self._scheduler, self._inbox, [*copying, *self._scheduler.idle_jobs, *jobs])
        if prefixes is not None:
            prefixes.wake = partial(self._inbox.put, None)
        self._thread = threading.Thread(target=self._worker.work, name="outrider", daemon=True)
        self._thread.start()
        _WORKERS[self._thread] = self._inbox
        # Garbage collection may run in any thread, which may have a lock that the worker waits for: nobody waits here.
        self._stop = weakref.finalize(self, self._inbox.put, Stop())

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return self._stop.alive

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def check_open(self) -> None:
        """Raise RequestError after `close`, and in a process that was forked from the worker's process."""
        check_process(self._pid)
        if not self._stop.alive:
            raise EngineClosed

    def check_may_wait(self) -> None:
        """Raise RequestError in the worker's own thread: what waits for an answer there would stop all of them."""
        if threading.current_thread() is self._thread:
            raise RequestError(
                "A sink, a drafter or an observer cannot wait for an answer: it runs in the engine's thread, so the "
                "answer would never come. Use engine.submit, or another thread."
            )

    def close(self) -> None:
        """End all requests with an error, and the worker. A second call does nothing."""
        check_process(self._pid)
        if self._stop.alive:
            self._stop()
            _wait_for(self._thread)
        self._scheduler.main = None

    def settle(self, drafts_until: float | None = None) -> None:
        """Wait until the worker leaves the main model alone, if no request comes. drafts_until: see `Settle`."""
        done = Settle(drafts_until)
        self._inbox.put(done)
        while self._thread is not threading.current_thread() and self._thread.is_alive() and not done.wait(1.0):
            pass

    def call(self, function: Callable[[Sequence[Answer]], object]) -> None:
        """Call a function with the answers that run, in the worker's thread between two rounds."""
        self._inbox.put(WorkerCall(lambda: function(self._scheduler.running)))

    @property
    def observer(self) -> Observer | None:
        """Is told of requests and rounds, from the next round on. May be set and removed at any time."""
        return self._scheduler.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._scheduler.observer = None if observer is None else guarded(observer, self._scheduler.forget)

    def submit(self, answer: Answer) -> None:
        """Start an answer. Its text and result go to its sink.

        Raises:
            RequestError: after `close`, and in a process that was forked from the worker's process.
        """
        self.check_open()
        self._inbox.put(answer)
        if not self._stop.alive:  # closed in the meantime: the worker may not read its inbox again
            self._thread.join()
            self._worker.give_up(EngineClosed())

    def cancel(self, answer: Answer) -> None:
        """End an answer that is not read any more, after the running round. From any thread."""
        answer.delivery.abandoned = True
        self.wake()

    def wake(self) -> None:
        """Let the worker look at readers and cancelled requests again. From any thread."""
        self._inbox.put(None)

    def run(self, answer: Answer) -> Generator[TextChunk, None, None]:
        """Run an answer to its end, and yield its text as it comes.

        Raises:
            OutriderError: when the answer fails.
            RequestError: in a process that was forked from the worker's process, and in the worker's own thread.
        """
        self.check_may_wait()
        news_of_it: SimpleQueue[News] = SimpleQueue()
        answer.delivery.sink = news_of_it
        try:
            self.submit(answer)
            while True:
                check_process(self._pid)  # it may have been forked since
                if news_of_it.empty():
                    self.wake()  # the worker may be waiting for a reader
                news = news_of_it.get()
                if isinstance(news, BaseException):
                    raise news
                yield news
                if news.result:
                    return
        finally:
            self.cancel(answer)  # may run in garbage collection, in any thread; SimpleQueue allows that


class Submitted:
    """An answer whose text and result go to a function, called in the worker's thread.

    handle = engine.submit(prompt, sink=lambda news: loop.call_soon_threadsafe(queue.put_nowait, news))
    handle.cancel()
    """

    def __init__(self, queue: RequestQueue, answer: Answer, sink: Callable[[News], object]) -> None:
        self._queue, self._answer, self._sink = queue, answer, sink
        answer.delivery.sink = self

    @property
    def done(self) -> bool:
        """Whether the result or an error was given to the sink."""
        return self._answer.delivery.done

    def cancel(self) -> None:
        """End the answer after the running round. Its result still comes. From any thread, at any time."""
        self._queue.cancel(self._answer)

    def put(self, news: News, /) -> None:
        """Call the function. If it raises, the request is cancelled."""
        try:
            self._sink(news)
        except BaseException:  # an app's code, in the engine's thread
            log.exception("A sink raised, so its request is cancelled.")
            self._sink = lambda _: None
            self.cancel()

    def qsize(self) -> int:
        """Always 0: nothing is buffered."""
        return 0


_WORKERS: weakref.WeakKeyDictionary[threading.Thread, Inbox] = weakref.WeakKeyDictionary()


@atexit.register
def _end_workers() -> None:
    """At the interpreter's end: a daemon must not die during a device's call."""
    for thread, inbox in list(_WORKERS.items()):
        inbox.put(Stop())
        _wait_for(thread)


def _wait_for(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():
        thread.join()
