"""Python processes that this program starts, and forks of it: they have none of its threads, the devices' included."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from outrider.errors import RequestError


def child_command(module: str) -> list[str] | None:
    """The command that runs a module in a process of its own; None if there is no Python interpreter to start.

    An app that is frozen into one file, or that embeds Python, would start itself.
    """
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").stem.lower().startswith(("python", "pypy")):
        return None
    return [sys.executable, "-P", "-m", module]


def start_child(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None, flags: int = 0, **pipes: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m module`, in a session of its own: Ctrl-C at a terminal reaches this process alone.

    environment: added to this process's. flags: of Windows. pipes: stdin, stdout and stderr, by default none.

    Raises:
        OSError: when it cannot be started; FileNotFoundError where there is no Python interpreter.
    """
    if (command := child_command(module)) is None:
        raise FileNotFoundError("this program has no Python interpreter to start another one with")
    search_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | pipes
    child = subprocess.Popen(  # noqa: S603  (our own interpreter)
        [*command, *arguments],
        env=os.environ | {"PYTHONPATH": search_path} | dict(environment or {}),
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0) | flags,
        **pipes,
    )
    return cast("subprocess.Popen[bytes]", child)


def check_process(pid: int) -> None:
    """Raise RequestError in a process that was forked from process `pid`: the engine would wait for ever there."""
    if os.getpid() != pid:
        raise RequestError(
            f"This engine was loaded in process {pid}, and this is {os.getpid()}, its fork, which has no copy of the "
            "engine's threads. Load an engine in each process that uses one, and start processes with "
            "multiprocessing.get_context('spawn')."
        )


def spare(owner: object, part: object) -> None:
    """Keep a device library's object alive in forked processes: its destructor would wait for threads.

    ONNX Runtime's own exit handlers may still wait where a fork ends by `sys.exit`; multiprocessing's forks run none.
    """
    weakref.finalize(owner, _spare, part, os.getpid())


def _spare(part: object, pid: int) -> None:
    if os.getpid() != pid:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
