"""What the C library does with memory that was freed."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGE = 4 << 20  # bytes


def return_large_buffers() -> None:
    """Have this process return buffers of 4 MB and more to the system as soon as they are freed.

    glibc raises its limits when it frees a buffer of up to 32 MB, and then keeps as much as 64 MB for each thread that
    had one: a server that unloads models would go on to hold hundreds of megabytes of their weights. Other C libraries
    are left as they are.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _LARGE)
