"""What the C library does with memory that was freed."""

import ctypes
import sys
from collections.abc import Callable

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGE = 4 << 20  # bytes


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
