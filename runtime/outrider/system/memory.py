"""Memory: how much the system and this process have, asked from each system directly, and arrays that take it late."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DONTNEED, _COLLAPSE = 4, 25  # MADV_DONTNEED of Linux, and MADV_COLLAPSE of Linux 6.1
_LARGE_PAGE = 2 << 20  # bytes
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGE = 4 << 20  # bytes
ROOM = 4096  # bytes after an array of `allocate_zeros` that can be read


def allocate_zeros(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros, uint8 [num_bytes], page-aligned. A page takes no memory before it is written to.

    After them are `ROOM` more: a kernel that reads whole vectors may read past its last number, and the next page may
    be unmapped.

    NumPy's zeros ask for pages of 2 MB, so that a cache would take all its memory as soon as a little of it is used.
    This memory returns to the system when it is freed, whatever its size.

    Raises:
        OSError, OverflowError: when there is too little memory.
    """
    options: dict[str, Any] = {}
    if hasattr(mmap, "MAP_ANONYMOUS"):  # Windows has no other kind
        options["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, num_bytes + ROOM, **options), dtype=np.uint8)[:num_bytes]


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


def full_regions(least: int) -> list[range]:
    """The addresses of this process's own memory, such as packed weights, in whole pages of 2 MB. Only on Linux.

    least: bytes of a region. One that is not in use almost whole is left out: it would take more memory in large pages.
    """
    try:
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    found, region = [], range(0)
    for line in filter(None, lines):
        name, *values = line.split()
        if not name.endswith(":"):
            begin, end = (int(each, 16) for each in name.split("-"))
            is_own = values[0] == "rw-p" and values[3] == "0" and values[4:] in ([], ["[heap]"])
            region = range(begin, end) if is_own and end - begin >= least else range(0)
        elif name == "Rss:" and region and 1024 * int(values[0]) >= 0.9 * len(region):
            whole = range(-(-region.start // _LARGE_PAGE) * _LARGE_PAGE, region.stop // _LARGE_PAGE * _LARGE_PAGE)
            found.append(whole)
    return [each for each in found if each]


def use_large_pages(addresses: range) -> None:
    """Move memory to pages of 2 MB, so that a processor looks up fewer addresses.

    Raises:
        OSError: with ENOMEM or EBUSY where the system has none left, and others where a part of the memory cannot be
            moved, such as one that was not written to yet.
    """
    advise = ctypes.CDLL(None, use_errno=True).madvise
    if advise(ctypes.c_void_p(addresses.start), ctypes.c_size_t(len(addresses)), _COLLAPSE):
        raise OSError(ctypes.get_errno(), "memory is not moved")


def return_large_buffers() -> None:
    """Have this process return buffers of 4 MB and more to the system as soon as they are freed.

    glibc raises its limits when it frees a buffer of up to 32 MB, and then keeps as much as 64 MB for each thread that
    had one: a server that unloads models would go on to hold hundreds of megabytes of their weights. Other C libraries
    are left as they are.
    """
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _LARGE)


def return_free_pages() -> None:
    """Return the pages that are free now, between smaller buffers that are not, to the system."""
    malloc_trim = _glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc; None where there is another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
