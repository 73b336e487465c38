"""The memory of this process."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Resident bytes of this process; on Linux without pages of mapped files, which vary."""
    if sys.platform == "win32":
        return _working_set()
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # the highest so far; in bytes on macOS


class _Counters(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS of psapi.h."""

    _fields_ = (
        ("cb", ctypes.c_uint32),
        ("PageFaultCount", ctypes.c_uint32),
        *(
            (name, ctypes.c_size_t)
            for name in (
                "PeakWorkingSetSize",
                "WorkingSetSize",
                "QuotaPeakPagedPoolUsage",
                "QuotaPagedPoolUsage",
                "QuotaPeakNonPagedPoolUsage",
                "QuotaNonPagedPoolUsage",
                "PagefileUsage",
                "PeakPagefileUsage",
            )
        ),
    )


def _working_set() -> int:
    """For Windows; not verified there."""
    kernel = ctypes.CDLL("kernel32")
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    kernel.K32GetProcessMemoryInfo.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Counters), ctypes.c_uint32)
    counters = _Counters(cb=ctypes.sizeof(_Counters))
    if not kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb):
        raise OSError("the process's memory cannot be asked for")
    return int(counters.WorkingSetSize)
