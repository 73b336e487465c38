"""Memory for keys and values on the host."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOM = 4096  # bytes after an array's end that can be read


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
