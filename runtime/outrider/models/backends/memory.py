"""The system's memory, asked from each operating system directly, to save a dependency."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_DONTNEED = 4  # MADV_DONTNEED of Linux


def system_memory() -> tuple[int | None, int | None]:
    """Total bytes of memory, and available bytes; None for what is unknown."""
    if sys.platform == "win32":
        return _windows_memory()
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total: int | None = page * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None, None
    return total, _linux_available()


def _linux_available() -> int | None:
    """Bytes that are free or can be freed at once. macOS has no such file."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else 1024 * int(found)


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = (
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        ("ullTotalPhys", ctypes.c_uint64),
        ("ullAvailPhys", ctypes.c_uint64),
        ("ullTotalPageFile", ctypes.c_uint64),
        ("ullAvailPageFile", ctypes.c_uint64),
        ("ullTotalVirtual", ctypes.c_uint64),
        ("ullAvailVirtual", ctypes.c_uint64),
        ("ullAvailExtendedVirtual", ctypes.c_uint64),
    )


def _windows_memory() -> tuple[int | None, int | None]:
    status = _MemoryStatus(dwLength=ctypes.sizeof(_MemoryStatus))
    kernel = getattr(ctypes, "windll").kernel32  # noqa: B009  (other systems' type checkers do not know it)
    if not kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None, None
    return status.ullTotalPhys, status.ullAvailPhys


def release_pages(path: Path) -> None:
    """Let go of the memory of a mapped file, which comes back page by page where it is read again. Only on Linux.

    The CPU plugin packs weights for its kernels in the first call, and the file stays in memory beside them.
    """
    if not sys.platform.startswith("linux"):
        return
    name = str(path.resolve())
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return
    for line in lines:
        addresses, rights, *_ = line.split(maxsplit=5)
        if line.endswith(f" {name}") and "w" not in rights:
            begin, end = (int(each, 16) for each in addresses.split("-"))
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED)
