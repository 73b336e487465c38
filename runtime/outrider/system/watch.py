"""Ends this process when untrusted work in it passes a limit, as nothing stops a native library from outside it."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread

_POLL_SECONDS = 0.01  # seconds between two looks at the time and the memory


class LimitWatch:
    """Ends the process when its work passes a limit.

    exceeded: is told which limit, "seconds" or "memory", and the bytes that the work took; then the process ends.
    base: bytes that the process had before. most: bytes that the work took beside them. writing: held while the process
    may be ended, so that it does not end in the middle of a line.
    """

    def __init__(self, exceeded: Callable[[str, int], object]) -> None:
        self.base, self.most = memory_in_use(), 0
        self.writing = Lock()
        self._exceeded = exceeded
        self._work: tuple[float, float, int] | None = None  # processor time at its begin, and its limits
        Thread(target=self._look, daemon=True).start()

    def begin(self, seconds: float, memory: int) -> None:
        """Limit what follows to these seconds of processor time and bytes of memory, until `end`."""
        limit_address_space(memory)
        self.most = 0
        self._work = time.process_time(), seconds, memory

    def end(self) -> None:
        """What follows has no limit."""
        self._work = None

    def _look(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            if (work := self._work) is None:
                continue
            began, seconds, memory = work
            self.most = max(self.most, memory_in_use() - self.base)
            beyond = "memory" if self.most > memory else ""
            beyond = beyond or ("seconds" if time.process_time() - began > seconds else "")
            with self.writing:
                if beyond and self._work is work:
                    try:
                        self._exceeded(beyond, self.most)
                    finally:  # the parent may be gone
                        os._exit(0)


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
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def limit_address_space(memory: int) -> None:
    """Let the system refuse memory far beyond a limit, where it can: between two looks much may be taken."""
    if sys.platform == "linux":
        import resource

        with suppress(OSError, ValueError):
            size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
            most = resource.getrlimit(resource.RLIMIT_AS)[1]
            wanted = size + 2 * memory + (256 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (wanted if most < 0 else min(wanted, most), most))


def limit_processor_time(seconds: float) -> None:
    """Let the system end this process after so many more seconds, and write no core file, where it can.

    No thread looks during one operation of Python's on a long text.
    """
    if sys.platform == "linux":
        import resource

        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            most = resource.getrlimit(resource.RLIMIT_CPU)[1]
            wanted = math.ceil(time.process_time() + seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (wanted if most < 0 else min(wanted, most), most))
