"""Python processes that this program starts, and forks of it: they have none of its threads, the devices' included."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from pathlib import Path

from outrider.errors import RequestError


def child_command(module: str) -> list[str] | None:
    """The command that runs a module in a process of its own; None if there is no Python interpreter to start.

    An app that is frozen into one file, or that embeds Python, would start itself.
    """
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").stem.lower().startswith(("python", "pypy")):
        return None
    return [sys.executable, "-P", "-m", module]


def child_environment() -> dict[str, str]:
    """This process's environment, and its module search path."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}


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
