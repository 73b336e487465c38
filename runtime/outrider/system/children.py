"""Python processes that this program starts, and the memory of a process."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


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


def memory_in_use() -> int:
    """Bytes of memory that this process occupies; on macOS the most that it has occupied."""
    if sys.platform == "win32":
        counters = (ctypes.c_size_t * 9)()  # PROCESS_MEMORY_COUNTERS; the first is two numbers of 4 bytes
        kernel = getattr(ctypes, "windll").kernel32  # noqa: B009
        kernel.GetCurrentProcess.restype = ctypes.c_void_p
        kernel.K32GetProcessMemoryInfo.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
        size = ctypes.sizeof(counters)
        return int(counters[2]) if kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), counters, size) else 0
    if sys.platform == "linux":
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
