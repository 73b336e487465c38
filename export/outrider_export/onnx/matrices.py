"""The matrices of a decoder in ONNX, in the format of MatMulNBits. Weights are read and written in pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider_export.onnx.files import PIECE, OnnxWeights
from outrider_export.sources.gguf_values import of_groups

BLOCK = 32
ZERO = 128  # the code of 0 in 8 bits


def quantise(matrix: NDArray[np.float32], block: int = BLOCK) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """8 bits per weight, symmetric: uint8 [rows, blocks, block] and float32 [rows, blocks] for float32 [rows, columns].

    As onnxruntime's own quantiser: the largest of a block's weights is stored as 0, which means −128 scales.
    """
    rows, blocks = len(matrix), math.ceil(matrix.shape[1] / block)
    values = np.empty((rows, blocks, block), dtype=np.uint8)
    scales = np.empty((rows, blocks), dtype=np.float32)
    for piece in _pieces(matrix):
        given = in_blocks(matrix[piece], block)
        scale = _largest(given) / -ZERO
        steps = given / np.where(scale == 0, 1, scale)[..., None]
        np.rint(steps, out=steps)
        steps += ZERO
        values[piece] = np.clip(steps, 0, 255, out=steps)
        scales[piece] = scale
    return values, scales


def _largest(groups: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of each group [..., columns], the number with the largest magnitude; of two, the first one."""
    low, high = of_groups(np.minimum, groups), of_groups(np.maximum, groups)
    largest: NDArray[np.float32] = np.where(-low > high, low, high)
    both = (low == -high) & (high > 0)
    if both.any():
        tied = groups[both]
        largest[both] = np.take_along_axis(tied, np.abs(tied).argmax(-1)[:, None], -1)[:, 0]
    return largest


def dequantise(weights: OnnxWeights, product: Any, rows: NDArray[np.int32] | None = None) -> NDArray[np.float32]:
    """Rows of the matrix of a MatMulNBits node, float32 [rows, columns]; all of them, or these.

    Raises:
        ExportError: if its columns are reordered.
    """
    if any(product.input[4:5]):
        raise ExportError(f"{product.name} reads its weights in another order (g_idx), which is not supported.")
    attributes = {attribute.name: attribute.i for attribute in product.attribute}
    count, columns, bits, block = (attributes.get(name, 4) for name in ("N", "K", "bits", "block_size"))
    blocks = math.ceil(columns / block)
    rows = np.arange(count, dtype=np.int32) if rows is None else rows
    codes, scales = (weights.read(name).reshape(count, -1) for name in product.input[1:3])
    zeros = weights.read(product.input[3]).reshape(count, -1) if any(product.input[3:4]) else None
    made = np.empty((len(rows), columns), dtype=np.float32)
    for piece in _pieces(made):
        steps = _unpack(codes[rows[piece]], bits).reshape(-1, blocks, block).astype(np.float32)
        if zeros is None:
            steps -= 1 << (bits - 1)
        else:
            zero = zeros[rows[piece]]
            zero = _unpack(zero, bits) if zero.dtype == np.uint8 else zero
            steps -= zero[:, :blocks, None].astype(np.float32)
        steps *= scales[rows[piece], :, None]
        made[piece] = steps.reshape(len(steps), -1)[:, :columns]
    return made


def _unpack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Numbers of some bits, uint8 [rows, n · 8 / bits], of bytes [rows, n]; the lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (codes[..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(len(codes), -1)


def _pieces(matrix: NDArray[Any]) -> Iterator[slice]:
    step = max(1, PIECE // (matrix.itemsize * matrix[0].size))
    return (slice(begin, begin + step) for begin in range(0, len(matrix), step))


def in_blocks(rows: NDArray[Any], block: int) -> NDArray[np.float32]:
    """float32 [rows, blocks, block], padded with zeros."""
    values, missing = rows.astype(np.float32, copy=False), -rows.shape[1] % block
    return (np.pad(values, ((0, 0), (0, missing))) if missing else values).reshape(len(rows), -1, block)
