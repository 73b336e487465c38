"""Engines in processes of their own, so that no two runtimes share memory, threads or a crash.

Modes that share an engine share a worker. Workers wait while another runs. The parent sends (mode's name, prompt,
config) through a pipe and gets a `Run`, a `AnsweredLoad` or a `_Failure` back; an engine's output goes to a file.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from outrider.config import GenerationConfig
from outrider.errors import DeviceWarning, OptionError, OutriderError, one_line
from outrider_bench.modes.make import load_modes
from outrider_bench.modes.mode import AnsweredLoad, Run
from outrider_bench.modes.name import ModeName
from outrider_bench.modes.setup import Setup

ModeLoader = Callable[[list[str], Setup], Iterable[Any]]

_PATIENCE = 3.0  # seconds for an engine to end by itself
_NO_ANSWER = (EOFError, OSError)  # the other end of the pipe is gone


class RunFailed(OutriderError):
    """A run failed. died: whether its process died."""

    def __init__(self, message: str, *, died: bool = False) -> None:
        super().__init__(message)
        self.died = died


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error in a worker. usage: whether it is an OptionError."""

    message: str
    usage: bool

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        kind = "" if isinstance(error, OutriderError) else f"{type(error).__name__}: "
        return cls(kind + one_line(error), isinstance(error, OptionError))


class BenchWorker:
    """A process with one engine and the modes that use it.

    log: a file for its output. load: makes its modes, for one prompt or several at a time. The process starts when it
    is first needed, and again after it has died.
    """

    def __init__(self, names: list[str], setup: Setup, log: Path, load: ModeLoader = load_modes) -> None:
        self.names, self.log = names, log
        self._load = load
        self.descriptions: dict[str, tuple[str, str]] = {}  # for each mode, its runtime and its description
        self._setup = setup
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """The process's id; None without a process."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Load the engine. Warns (`DeviceWarning`) if a requested device is replaced.

        Raises:
            OptionError: for invalid modes.
            RunFailed: when they cannot be loaded.
        """
        spawn = multiprocessing.get_context("spawn")  # available on all systems
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=_serve,
            args=(theirs, self.names, self._setup, str(self.log), self._load),
            daemon=True,
            name=self.names[0],
        )
        self._process.start()
        theirs.close()  # so that we notice when the worker ends
        try:
            self.descriptions, warned = self._answer()
        except OutriderError:
            self.close()
            raise
        for message in warned:
            warnings.warn(message, DeviceWarning, stacklevel=2)

    def run(self, name: str, prompt: Any, config: GenerationConfig) -> Any:
        """Decode in a mode: a prompt for a `Run`, or several at a time for a `AnsweredLoad`.

        Raises:
            OptionError: when the mode cannot follow these options.
            RunFailed: when the run failed, or its process died.
        """
        if self._connection is None:
            self.start()
        assert self._connection is not None  # noqa: S101
        with contextlib.suppress(*_NO_ANSWER):  # `_answer` then reports it
            self._connection.send((name, prompt, config))
        return self._answer()

    def close(self) -> None:
        """End the process. It is killed if it does not end soon."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.join(_PATIENCE)
            self._process.terminate()
            self._process.join()
        self._connection = self._process = None

    def _answer(self) -> Any:
        assert self._connection is not None  # noqa: S101
        try:
            answer = self._connection.recv()
        except _NO_ANSWER:
            raise RunFailed(self._last_words(), died=True) from None
        if isinstance(answer, _Failure):
            if answer.usage:
                raise OptionError(answer.message)
            raise RunFailed(answer.message)
        return answer

    def _last_words(self) -> str:
        """How the process ended, with the last line of its output."""
        assert self._process is not None  # noqa: S101
        self._process.join(10)
        code = self._process.exitcode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self.close()
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n") if self.log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"the process died ({how})" + (f": {last[:200]}" if last else "")


class RemoteMode:
    """A mode in a started worker, with the interface of a local one."""

    num_parallel = 1

    def __init__(self, name: str, worker: BenchWorker) -> None:
        self.name, self.worker = name, worker
        self.runtime, self.description = worker.descriptions[name]

    def run(self, prompt: Any, config: GenerationConfig) -> Any:
        """As `BenchWorker.run`."""
        return self.worker.run(self.name, prompt, config)


@contextmanager
def start_workers(
    names: list[str], setup: Setup, logs: Path, failed: Callable[[str, str], None], load: ModeLoader = load_modes
) -> Iterator[list[RemoteMode]]:
    """The modes of these names, each engine in a process of its own; all of them end with the block.

    logs: a folder for the workers' output. failed: called with the name of a mode that cannot be loaded, and the
    reason. load: as in `BenchWorker`.

    Raises:
        OptionError: for an invalid mode.
    """
    workers = {}
    for label in dict.fromkeys(ModeName.parse(name).worker for name in names):
        mine = [name for name in names if ModeName.parse(name).worker == label]
        workers[label] = BenchWorker(mine, setup, logs / f"{label}.log", load)
    try:
        modes: dict[str, RemoteMode] = {}
        for worker in workers.values():
            try:
                worker.start()
            except RunFailed as error:
                for name in worker.names:
                    failed(name, str(error))
            else:
                modes |= {name: RemoteMode(name, worker) for name in worker.names}
        yield [modes[name] for name in names if name in modes]
    finally:
        for worker in workers.values():
            worker.close()


def _serve(connection: Connection, names: list[str], setup: Setup, log: str, load: ModeLoader) -> None:
    """Run requests from the pipe until it closes. Ctrl-C is handled by the parent, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):  # C libraries write here past sys.stdout
        os.dup2(file, stream)
    try:
        with _device_warnings() as warned:
            modes = {mode.name: mode for mode in load(names, setup)}
    except Exception as error:
        connection.send(_Failure.of(error))
        return
    described = {name: (mode.runtime, mode.description) for name, mode in modes.items()}
    connection.send((described, warned))
    while True:
        try:
            name, prompt, config = connection.recv()
        except _NO_ANSWER:
            return
        try:
            answer: Run | AnsweredLoad | _Failure = modes[name].run(prompt, config)
        except Exception as error:
            answer = _Failure.of(error)
        connection.send(answer)


@contextmanager
def _device_warnings() -> Iterator[list[str]]:
    """Collect the block's device warnings, which the parent shows. Other warnings go to the log."""
    warned: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", DeviceWarning)
        show = warnings.showwarning

        def collect(message: Warning | str, category: type[Warning], *where: Any, **how: Any) -> None:
            if issubclass(category, DeviceWarning):
                warned.append(str(message))
            else:
                show(message, category, *where, **how)

        warnings.showwarning = collect
        yield warned
