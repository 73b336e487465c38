"""OpenVINO's core, without the signal stack that its CPU plugin leaves behind, and its arrays in several threads."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import openvino as ov


class _SignalStack(ctypes.Structure):
    """stack_t of Linux."""

    _fields_ = (("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


_preparing = threading.Lock()


def prepare_arrays() -> None:
    """Have OpenVINO's Python module make its tables of NumPy's types now. Before it is used in several threads.

    It makes them at its first array, after a lock of C++'s. As it waits for Python's own lock meanwhile, two threads
    that have their first array at the same time wait for each other for ever (openvino 2026.4).
    """
    import openvino as ov

    with _preparing:
        array = np.zeros(1, np.float32)
        _ = ov.op.Constant(array).get_data(), ov.Tensor(array).data


def new_core() -> ov.Core:
    """A core, after which signals are handled on the stack that they were handled on before.

    The CPU plugin (2026.4) gives the thread that loads it an alternate signal stack. When the core is freed, the plugin
    unmaps that stack and puts back the one that it found. Where cores are freed in another order than they were made
    in, or in another thread, a thread is left with an unmapped stack. Python's handlers run on it (SA_ONSTACK), so that
    Ctrl-C or SIGTERM ends the process with a segmentation fault.
    """
    import openvino as ov  # many commands do without it

    if sys.platform != "linux":
        return ov.Core()
    sigaltstack, before = ctypes.CDLL(None).sigaltstack, _SignalStack()
    sigaltstack(None, ctypes.byref(before))
    core = ov.Core()
    with contextlib.suppress(RuntimeError):  # an installation without that plugin
        core.get_property("CPU", "FULL_DEVICE_NAME")  # which is loaded when it is asked for the first time
    sigaltstack(ctypes.byref(before), None)
    return core
