"""Protection of forked processes: they have none of their parent's threads, including the devices' threads."""

from __future__ import annotations

import ctypes
import os
import weakref

from outrider.errors import RequestError


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
