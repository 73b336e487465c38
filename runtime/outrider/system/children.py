"""Processes of our own for work that is not trusted, in limits of time and memory, which nothing else keeps it within.

    pool = ChildPool("outrider.tokens.grammar.child", Start(…))
    verdict = pool.ask(GrammarTrial(…, seconds=10, memory=128 << 20), GrammarVerdict)

    answer(GrammarTrial, GrammarVerdict, work)    # in the child: makes an outcome of each question

Questions and outcomes are lines of JSON on the child's standard input and output.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Semaphore, Thread
from typing import IO, TypeVar, cast

import msgspec

from outrider.system.processes import start_child
from outrider.system.watch import LimitWatch, limit_processor_time, memory_in_use

POLL_SECONDS = 0.05  # seconds between two looks whether the client has left
_START_SECONDS = 120.0  # seconds that a process may take to be ready
_PATIENCE_FACTOR = 10  # times a question's limit: processor time passes more slowly on a busy machine
_GRACE_SECONDS = 2.0  # of processor time after a limit, until the system ends the process
_OUT_OF_TIME = -getattr(signal, "SIGXCPU", 1000)  # how the system ends a process then
_RETIRE_BYTES = 64 << 20  # bytes that earlier work may leave behind


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Work for a child. seconds: of processor time. memory: bytes."""

    seconds: float
    memory: int


class ChildOutcome(msgspec.Struct, kw_only=True):
    """What became of it. beyond: the limit that it passed, "seconds" or "memory"; "process" if the process has ended.

    memory: bytes that it took. retires: whether the process ends now.
    """

    beyond: str = ""
    memory: int = 0
    retires: bool = False


Struct = TypeVar("Struct", bound=msgspec.Struct)
Asked = TypeVar("Asked", bound=Question)
Made = TypeVar("Made", bound=ChildOutcome)


class ClientLeft(Exception):
    """Nobody waits for the outcome any more."""


class NoChild(Exception):
    """No process can be started here."""


class ChildPool:
    """Up to `most` processes of a module, which are started when they are needed and kept. From any thread.

    A process that passes a limit, or whose client leaves, is ended. start: the first line that it reads.
    """

    def __init__(self, module: str, start: msgspec.Struct | None = None, most: int = 2) -> None:
        self._module, self._start = module, start
        self._slots = Semaphore(most)
        self._lock = Lock()
        self._idle: list[_Child] = []
        self._all: weakref.WeakSet[_Child] = weakref.WeakSet()
        self.closed = False
        weakref.finalize(self, _end_all, self._all, os.getpid())

    @property
    def process_ids(self) -> list[int]:
        """Of the processes that run."""
        return [child.process.pid for child in [*self._all] if child.process.poll() is None]

    def close(self) -> None:
        """End the processes. Questions that wait raise ClientLeft."""
        self.closed = True
        _end_all(self._all, os.getpid())

    def start(self) -> None:
        """Have a process before the first question, unless there is one.

        Raises:
            NoChild: when no process can be started here.
        """
        with self._slot(None):
            if self.process_ids:
                return
            child = self._new_child(None)
            with self._lock:
                self._idle.append(child)

    def ask(self, question: Question, kind: type[Made], gone: Event | None = None) -> Made:
        """Have work done. kind: of the outcome. gone: is set when nobody waits for it any more.

        Raises:
            ClientLeft: when `gone` is set, or the pool is closed. The process is ended.
            NoChild: when no process can be started here.
        """
        with self._slot(gone):
            if self.closed:
                raise ClientLeft
            with self._lock:
                child = self._idle.pop() if self._idle else None
            if child is None or child.process.poll() is not None:
                child = self._new_child(gone)
            made: Made | None = None
            try:
                made = child.ask(question, kind, question.seconds * _PATIENCE_FACTOR, gone)
            finally:
                if made is None or made.retires or self.closed:
                    child.end()
                else:
                    with self._lock:
                        self._idle.append(child)
            if self.closed:
                raise ClientLeft
            return made

    @contextmanager
    def _slot(self, gone: Event | None) -> Iterator[None]:
        while not self._slots.acquire(timeout=POLL_SECONDS):
            if gone is not None and gone.is_set():
                raise ClientLeft
        try:
            yield
        finally:
            self._slots.release()

    def _new_child(self, gone: Event | None) -> _Child:
        try:
            child = _Child(self._module)
        except OSError as error:
            raise NoChild(str(error)) from error
        self._all.add(child)
        ready = False
        try:
            ready = not child.ask(self._start, ChildOutcome, _START_SECONDS, gone).beyond
        finally:
            if not ready or self.closed:
                child.end()
        if self.closed:
            raise ClientLeft
        if not ready:
            raise NoChild(f"the process {self._module} has ended")
        return child


class _Child:
    """A process. Its lines are read in a thread, as pipes have no time limit everywhere."""

    def __init__(self, module: str) -> None:
        self.process = start_child(module, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._input = cast("IO[bytes]", self.process.stdin)
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        Thread(target=_read, args=(cast("IO[bytes]", self.process.stdout), self._lines), daemon=True).start()

    def ask(self, line: msgspec.Struct | None, kind: type[Made], patience: float, gone: Event | None) -> Made:
        """Send a line, if there is one, and wait for its outcome."""
        with suppress(OSError):  # it has ended, as the next line says
            if line is not None:
                self._input.write(_line_of(line))
                self._input.flush()
        until = time.monotonic() + patience
        while True:
            with suppress(Empty):
                found = self._lines.get(timeout=POLL_SECONDS)
                if found:
                    return _value_of(found, kind)
                is_late = self.process.wait() == _OUT_OF_TIME
                return kind(beyond="seconds" if is_late else "process", retires=True)
            if gone is not None and gone.is_set():
                raise ClientLeft
            if time.monotonic() > until:
                return kind(beyond="seconds", retires=True)

    def end(self) -> None:
        """Kill the process, and wait until it has ended."""
        self.process.kill()
        self.process.wait()
        with suppress(OSError):
            self._input.close()


def _read(pipe: IO[bytes], lines: SimpleQueue[bytes]) -> None:
    """Put each line, and b"" at the end."""
    with pipe:
        for line in pipe:
            lines.put(line)
    lines.put(b"")


def _end_all(children: weakref.WeakSet[_Child], pid: int) -> None:
    """End the children of process `pid`; not in a fork of it."""
    for child in [*children] if os.getpid() == pid else ():
        child.end()


def _line_of(value: msgspec.Struct) -> bytes:
    """JSON in ASCII: texts may have halves of characters, which UTF-8 has not."""
    return json.dumps(msgspec.to_builtins(value)).encode() + b"\n"


def _value_of(line: bytes, kind: type[Struct]) -> Struct:
    return msgspec.convert(json.loads(line), kind)


# In the child.


def read_start(kind: type[Struct]) -> Struct:
    """The first line."""
    return _value_of(sys.stdin.buffer.readline(), kind)


def answer(kind: type[Asked], made: type[Made], work: Callable[[Asked], Made]) -> None:
    """Make an outcome of each question, until standard input ends or too much memory is left behind."""
    watch = LimitWatch(lambda beyond, most: _write(made(beyond=beyond, memory=most, retires=True)))
    _write(made())
    for line in sys.stdin.buffer:
        question = _value_of(line, kind)
        watch.begin(question.seconds, question.memory)
        limit_processor_time(question.seconds + _GRACE_SECONDS)
        try:
            outcome = work(question)
        except MemoryError:
            outcome = made(beyond="memory", retires=True)
        with watch.writing:
            watch.end()
            left = memory_in_use() - watch.base
            outcome.memory = max(0, watch.most, left)
            outcome.retires = outcome.retires or left > _RETIRE_BYTES
            _write(outcome)
        if outcome.retires:
            break
    os._exit(0)


def _write(outcome: ChildOutcome) -> None:
    sys.stdout.buffer.write(_line_of(outcome))
    sys.stdout.buffer.flush()
