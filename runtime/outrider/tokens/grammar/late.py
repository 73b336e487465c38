"""The thread that computes masks which take long, while the rounds of other answers go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Lock, Thread

_MOST_LOST = 3  # threads that are left to a mask without end


class LateJob:
    """Work for the thread. seconds: of processor time that it took. error: what it raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self.began: float | None = None
        self.seconds = 0.0
        self.error: BaseException | None = None
        self.is_done = False
        self.is_lost = False

    def run(self) -> None:
        """Do the work, in the thread."""
        self.began, began = time.monotonic(), time.thread_time()
        try:
            self._work()
        except BaseException as error:  # a panic in llguidance is no Exception
            self.error = error
        self.seconds = time.thread_time() - began
        self.is_done = True

    def has_run(self) -> float:
        """Seconds since it was begun; 0 before."""
        return 0.0 if self.began is None else time.monotonic() - self.began


class LateThread:
    """Runs jobs in their order, one at a time: slow grammars share one core.

    A thread whose job is lost is replaced, and ends after that job.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[LateJob] = SimpleQueue()
        self._lock = Lock()
        self._wanted = 0  # threads that take jobs
        self._lost = 0
        self._came = Event()

    def submit(self, work: Callable[[], object]) -> LateJob:
        """Run this in the thread."""
        job = LateJob(work)
        self._jobs.put(job)
        self._ensure()
        return job

    def lose(self, job: LateJob) -> None:
        """Wait no longer for a job that runs."""
        with self._lock:
            if job.is_done or job.is_lost:
                return
            job.is_lost = True
            self._lost += 1
            self._wanted -= 1
        self._ensure()

    def wait(self, seconds: float) -> None:
        """Wait until a job is done, or for this time."""
        self._came.wait(seconds)
        self._came.clear()

    def _ensure(self) -> None:
        with self._lock:
            if self._wanted or self._lost > _MOST_LOST:
                return
            self._wanted = 1
        Thread(target=self._run, name="outrider masks", daemon=True).start()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            job.run()
            self._came.set()
            with self._lock:
                if job.is_lost:
                    self._lost -= 1
                    break
            del job
        self._ensure()  # where too many were lost


LATE = LateThread()
