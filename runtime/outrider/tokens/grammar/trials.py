"""Tries grammars in processes of their own, with limits of time and memory, before they are compiled in this one."""

from __future__ import annotations

import subprocess
import time
import weakref
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Semaphore, Thread
from typing import IO, TYPE_CHECKING, cast

import msgspec

from outrider.system.processes import child_command, child_environment
from outrider.tokens.grammar.child import GrammarTrial, GrammarVerdict, Start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.tokens.grammar.kinds import GrammarSource
    from outrider.tokens.grammar.limits import GrammarLimits

_MODULE = "outrider.tokens.grammar.child"
_NUM_CHILDREN = 2
POLL_SECONDS = 0.05  # seconds between two looks whether the client has left
_START_SECONDS = 120.0  # seconds that a process may take to be ready
_PATIENCE_FACTOR = 10  # times a trial's limit: processor time passes more slowly on a busy machine


class ClientLeft(Exception):
    """Nobody waits for the grammar any more."""


class NoChild(Exception):
    """Grammars cannot be tried in another process here."""


class Trials:
    """Tries grammars in at most two processes, which are started when they are needed and kept.

    A process that passes a limit, or whose client leaves, is ended. start: the tokenizer. From any thread.
    """

    def __init__(self, start: Start, limits: GrammarLimits) -> None:
        self._start, self._limits = start, limits
        self._slots = Semaphore(_NUM_CHILDREN)
        self._lock = Lock()
        self._idle: list[_Child] = []
        self._all: weakref.WeakSet[_Child] = weakref.WeakSet()
        self.closed = False
        weakref.finalize(self, _end_all, self._all)

    @property
    def process_ids(self) -> list[int]:
        """Of the processes that run."""
        return [child.process.pid for child in [*self._all] if child.process.poll() is None]

    def close(self) -> None:
        """End the processes. Trials that run raise ClientLeft."""
        self.closed = True
        _end_all(self._all)

    def check(self, source: GrammarSource, gone: Event | None = None) -> GrammarVerdict:
        """Try a grammar. gone: is set when nobody waits for it any more.

        Raises:
            ClientLeft: when `gone` is set, or the engine is closed. The process is ended.
            NoChild: when no process can be started here.
        """
        limits = self._limits
        trial = GrammarTrial(source.option, source.text, limits.compile_seconds, limits.compile_memory)
        with self._slot(gone):
            if self.closed:
                raise ClientLeft
            with self._lock:
                child = self._idle.pop() if self._idle else None
            if child is None or child.process.poll() is not None:
                child = self._new_child(gone)
            verdict: GrammarVerdict | None = None
            try:
                verdict = child.ask(trial, limits.compile_seconds * _PATIENCE_FACTOR, gone)
            finally:
                if verdict is None or verdict.retires or self.closed:
                    child.end()
                else:
                    with self._lock:
                        self._idle.append(child)
            if self.closed:
                raise ClientLeft
            return verdict

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
        command = child_command(_MODULE)
        if command is None:
            raise NoChild("this program has no Python interpreter to start another one with")
        try:
            child = _Child(command)
        except OSError as error:
            raise NoChild(str(error)) from error
        self._all.add(child)
        ready = False
        try:
            ready = not child.ask(self._start, _START_SECONDS, gone).beyond
        finally:
            if not ready:
                child.end()
        if self.closed:
            child.end()
            raise ClientLeft
        if not ready:
            raise NoChild("the process that tries grammars has ended")
        return child


class _Child:
    """A process that tries grammars. Its answers are read in a thread, as pipes have no time limit everywhere."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(  # noqa: S603  (our own interpreter)
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        self._input = cast("IO[bytes]", self.process.stdin)
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        Thread(target=_read, args=(cast("IO[bytes]", self.process.stdout), self._lines), daemon=True).start()

    def ask(self, question: Start | GrammarTrial, patience: float, gone: Event | None) -> GrammarVerdict:
        """Send a line and wait for its answer."""
        with suppress(OSError):  # it has ended, as the next line says
            self._input.write(msgspec.json.encode(question) + b"\n")
            self._input.flush()
        until = time.monotonic() + patience
        while True:
            with suppress(Empty):
                line = self._lines.get(timeout=POLL_SECONDS)
                return (
                    msgspec.json.decode(line, type=GrammarVerdict)
                    if line
                    else GrammarVerdict(beyond="process", retires=True)
                )
            if gone is not None and gone.is_set():
                raise ClientLeft
            if time.monotonic() > until:
                return GrammarVerdict(beyond="seconds", retires=True)

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


def _end_all(children: weakref.WeakSet[_Child]) -> None:
    for child in [*children]:
        child.end()
