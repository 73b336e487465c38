"""FP8 (E4M3), in which checkpoints of Ministral 3, Qwen3 and others are published: a scale for each block of a matrix.

    numbers = unpacked(codes) * scales_of_rows(scales, shape, block, part)

Source: OCP 8-bit Floating Point Specification 1.0; Transformers 5.5, integrations/finegrained_fp8.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

KIND, SCALES = "F8_E4M3", "_scale_inv"  # as safetensors files name it; what follows a matrix's name
_CODES = np.arange(256)
_EXPONENTS, _MANTISSAS = _CODES >> 3 & 15, _CODES & 7
_NUMBERS = np.ldexp(np.where(_EXPONENTS, 8 + _MANTISSAS, _MANTISSAS), np.maximum(_EXPONENTS, 1) - 10)
_NUMBERS = np.where(_CODES & 128, -_NUMBERS, _NUMBERS).astype(np.float32)
_NUMBERS[[127, 255]] = np.nan


def unpacked(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers of codes."""
    found: NDArray[np.float32] = _NUMBERS[codes]
    return found


def block_of(config: Mapping[str, Any], shape: tuple[int, int]) -> tuple[int, int]:
    """The rows and columns of a matrix that share a scale, by config.json: all, if it names no block."""
    quantised = config.get("quantization_config") or {}
    rows, columns = quantised.get("weight_block_size") or shape
    return max(int(rows), 1), max(int(columns), 1)


def scales_of_rows(
    scales: NDArray[np.float32], shape: tuple[int, int], block: tuple[int, int], rows: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The scale of each number of some rows, float32 [rows, columns]. scales: one, or one for each block.

    Raises:
        ValueError: when there are more or fewer than blocks.
    """
    counts = tuple(math.ceil(size / each) for size, each in zip(shape, block, strict=True))
    if scales.size != math.prod(counts):
        raise ValueError(f"{scales.size:,} scales for {math.prod(counts):,} blocks")
    return np.repeat(scales.reshape(counts)[rows // block[0]], block[1], axis=1)[:, : shape[1]]
