"""Puts the rows of queries and keys in the order in which the graphs rotate them: number i with number i + size / 2.

Other orders are those of neighbours (2i with 2i + 1), and of heads of which only the first numbers are rotated. No
product of queries and keys depends on the order of a head's numbers, so reordering both changes nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROTATED = re.compile(r"\.[qk]_(proj|norm)\.(weight|bias)\Z")


def in_halves(
    tensors: Mapping[str, NDArray[Any]], size: int, frequencies: NDArray[np.float32], *, interleaved: bool
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
    """The tensors, and the frequencies float32 [size / 2], for rotating halves.

    size: numbers of a head. frequencies: float32 [n], for the first 2n of these. interleaved: neighbours are rotated.
    """
    count = len(frequencies)
    if not interleaved and 2 * count == size:
        return dict(tensors), frequencies
    rotated, rest = np.arange(2 * count), np.arange(2 * count, size)
    first, second = (rotated[::2], rotated[1::2]) if interleaved else (rotated[:count], rotated[count:])
    half = len(rest) // 2
    order = np.concatenate([first, rest[:half], second, rest[half:]])
    made = {
        name: values.reshape(-1, size, *values.shape[1:])[:, order].reshape(values.shape)
        if _ROTATED.search(name)
        else values
        for name, values in tensors.items()
    }
    return made, np.concatenate([frequencies, np.zeros(half, np.float32)])
