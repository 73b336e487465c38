"""Memory for keys and values on the host."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def allocate_zeros(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros, uint8 [num_bytes], that begin at a page, and of which no page is taken before it is written to.

    Not NumPy's own, which ask for pages of 2 MB: a cache would be there as a whole when a little of it is used. Goes
    back to the system when it is freed, whatever its size.

    Raises:
        OSError, OverflowError: where there is no room for so many.
    """
    options: dict[str, Any] = {}
    if hasattr(mmap, "MAP_ANONYMOUS"):  # not on Windows, where nothing else is to be had
        options["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, num_bytes, **options), dtype=np.uint8)
