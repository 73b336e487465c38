"""MXFP4, in which gpt-oss is published: groups of 32 numbers in 4 bits, with a power of two for each group.

OpenVINO (2026.4) widens experts in this type to 32 bits when it loads a model. So they are kept in 8 bits, exactly: a
number is half an integer of at most 12, times the power of two.

Source: OCP Microscaling Formats 1.0; Transformers 5.5, integrations/mxfp4.py (the order in files).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

GROUP = 32
ZERO = 16  # the code of zero
_NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by their code
_BIAS = 127  # of powers of two
_SMALLEST = np.float32(2.0**-24)  # of float16, in which scales are stored


def unpacked(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Numbers float32 [rows, groups · 32] of blocks uint8 [rows, groups · 16] and scales uint8 [rows, groups]."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, GROUP)
    found: NDArray[np.float32] = np.ldexp(_NUMBERS[codes], scales[..., None].astype(np.int32) - _BIAS)
    return found.reshape(scales.shape[0], -1)


def exact(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[Any], NDArray[np.float16]]:
    """Numbers of this type in 8 bits, without a loss: codes uint8, zero points uint8 and scales float16 by group.

    values: [rows, columns]. Scales below float16's smallest number become that.
    """
    grouped = values.reshape(len(values), -1, GROUP)
    largest = np.abs(grouped).max(-1)
    scales = np.ldexp(np.float32(1), np.frexp(largest)[1] - 4).astype(np.float32)  # the largest is 8 to 15 of them
    scales = np.maximum(np.where(largest > 0, scales, 1), _SMALLEST)
    codes = np.rint(grouped / scales[..., None] + ZERO).astype(np.uint8)
    return codes.reshape(values.shape), np.full(scales.shape, ZERO, np.uint8), scales.astype(np.float16)
