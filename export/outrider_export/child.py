"""Run one conversion in a Python process of its own.

The libraries print to stdout, hold the interpreter for minutes, do not free gigabytes when they are done, and may
crash. A child isolates the caller from this. `run_child` relays its progress, turns its failure into an `ExportError`,
and kills it when the caller is interrupted. A child whose parent has died ends itself.

The parent writes the job to the child's stdin as one line of JSON and keeps the pipe open. The child answers on its
stdout in lines of JSON; libraries' output goes to its stderr, which becomes the error's cause.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, cast

from outrider.errors import ExportError
from outrider.system import saved
from outrider.system.processes import start_child
from outrider.system.watch import LimitWatch
from outrider_export.progress import Progress

_QUIET = {
    "HF_HUB_OFFLINE": "1",  # everything was downloaded before
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "PYTHONIOENCODING": "utf-8",
    "PYTHONUTF8": "1",
}


class ChildFailed(Exception):
    """A failed child's stderr, as the cause of an `ExportError`."""


def run_child(work: str, job: dict[str, Any], what: str, progress: Progress) -> dict[str, Any]:
    """Call a function of this whole name with `job` and a progress in a child, and return its result.

    what: the beginning of an error message: "The main model cannot be converted".

    Raises:
        ExportError: if the child fails or crashes, its cause has its stderr; or where no Python can be started.
    """
    with tempfile.TemporaryFile() as log:
        child = _start(__name__, work, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, environment=_QUIET)
        try:
            final = _listen(child, job, progress)
            code = child.wait()
        finally:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
        if "result" in final:
            return dict(final["result"])
        log.seek(0)
        text = log.read().decode("utf-8", "replace").strip()
        last = text.splitlines()[-1][:300] if text else "it said nothing"
        killed = f"its process was killed, perhaps because memory ran out: {last}"
        reason = final.get("error") or (killed if code == -9 else f"its process ended with code {code}: {last}")
        raise ExportError(f"{what}: {reason}") from ChildFailed(text)


def _start(*command: str, **options: Any) -> subprocess.Popen[bytes]:
    """`start_child`; raises ExportError where there is no Python."""
    try:
        return start_child(*command, **options)
    except FileNotFoundError as error:
        raise ExportError(
            "This program has no Python interpreter to convert models with. Give it a bundle: outrider export MODEL."
        ) from error


def lower_priority() -> None:
    """Leave the processor to all others from now on: this process, and those that it starts.

    On Linux a thread of any other program takes it at once: an answer beside keeps 0.8 of its speed on two cores, and
    0.69 beside a program whose niceness alone is high.
    """
    if hasattr(os, "nice"):  # not on Windows
        os.nice(19 - os.nice(0))
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def begin_beside(module: str, arguments: Sequence[Any]) -> Callable[[], bool]:
    """Run `python -m module`, which calls `work_beside`, in a process that goes on when this one ends.

    Returns what says whether it has ended, and raises ExportError if it failed. Raises ExportError as `run_child`.
    """
    log = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as anybody may ask
    environment = {"OUTRIDER_CACHE": str(saved.FOLDER), "PYTHONUTF8": "1"}
    flags = getattr(subprocess, "IDLE_PRIORITY_CLASS", 0)
    child = _start(module, json.dumps(arguments), stderr=log, environment=environment, flags=flags)

    def has_ended() -> bool:
        if child.poll():
            log.seek(0)
            text = log.read().decode("utf-8", "replace").strip()
            raise ExportError(text.splitlines()[-1] if text else f"its process ended with code {child.returncode}")
        return child.returncode == 0

    return has_ended


def work_beside(work: Callable[..., object]) -> None:
    """The child of `begin_beside`: call `work` with the arguments, when no other process needs the processors."""
    lower_priority()  # on Windows, the parent has said it
    try:
        work(*json.loads(sys.argv[1]))
    except Exception as error:
        sys.exit(_one_line(error))


def _listen(child: subprocess.Popen[bytes], job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Send the job, relay progress until the child is done, and return its last message."""
    given, messages = cast("IO[bytes]", child.stdin), cast("IO[bytes]", child.stdout)
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        with contextlib.suppress(ValueError):  # closed, as the parent is interrupted
            for line in messages:
                lines.put(line)
        lines.put(None)

    # A thread, because a blocking read cannot be interrupted by Ctrl-C on Windows.
    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(OSError):  # if the child has died already, no messages come
        given.write(json.dumps(job).encode() + b"\n")
        given.flush()
    final: dict[str, Any] = {}
    while True:
        try:
            line = lines.get(timeout=0.2)
        except queue.Empty:
            continue
        if line is None:
            return final
        kind, *rest = json.loads(line)
        if kind in ("result", "error"):
            final = {kind: rest[0]}
        else:
            getattr(progress, kind)(*rest)


class _Relay:
    """The child's `Progress`: sends everything to the parent."""

    def __init__(self, channel: IO[str]) -> None:
        self.channel = channel

    def send(self, *message: object) -> None:
        self.channel.write(json.dumps(message) + "\n")
        self.channel.flush()

    def phase(self, name: str, total: int | None = None) -> None:
        self.send("phase", name, total)

    def advance(self, count: int) -> None:
        self.send("advance", count)

    def note(self, text: str) -> None:
        self.send("note", text)


@contextlib.contextmanager
def limited(progress: Progress, what: str, *, seconds: float, memory: int) -> Iterator[None]:
    """End this child, with an error that begins with `what`, when it takes more processor time or bytes than these."""
    if not isinstance(progress, _Relay):  # this is no child
        yield
        return
    limits = {"seconds": f"{seconds:g} seconds", "memory": f"{memory >> 20:,} MB of memory"}
    watch = LimitWatch(lambda beyond, _: progress.send("error", f"{what} takes more than {limits[beyond]}, the limit."))
    watch.begin(seconds, memory)
    try:
        yield
    finally:
        watch.end()


def serve(work: str) -> None:
    """The child: read the job from stdin, call `work(job, progress)`, send its result, end the process."""
    relay = _Relay(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # from here on, stdout goes to the log
    # With this package, the libraries would send usage statistics.
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    job = json.loads(_read_line())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        module, _, name = work.rpartition(".")
        relay.send("result", getattr(importlib.import_module(module), name)(job, relay))
        code = 0
    except BaseException as error:  # the parent gets every error
        traceback.print_exc()
        relay.send("error", _one_line(error))
        code = 1
    sys.stderr.flush()
    os._exit(code)  # all is done, and the libraries' teardown may hang or crash


def _read_line() -> str:
    """One line of stdin, unbuffered, so that the thread which watches for its end owns the rest."""
    line = bytearray()
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode("utf-8")


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(3)


def _one_line(error: BaseException) -> str:
    if isinstance(error, ExportError):
        return str(error)
    text = " ".join(str(error).split())
    if "ignore_mismatched_sizes" in text:  # Transformers' message, whose figures are in the log
        return "weights of the checkpoint have other shapes than its config.json says. Download the checkpoint again."
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


if __name__ == "__main__":
    importlib.import_module("outrider_export.child").serve(sys.argv[1])  # the module that jobs know
