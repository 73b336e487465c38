"""The matrices of a decoder in ONNX, in the format of MatMulNBits, and its output matrix for some tokens only.

    weights = OnnxWeights(load(path), path.parent)       # the graph, and its weights in their files
    cut_output(weights, np.array([0, 1, 2, 151_645]))    # the model now gives logits for these four ids
    weights.save(folder)                                 # model.onnx, and model.onnx.data with the used weights

Weights are read and written in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider_export.onnx.files import PIECE, OnnxWeights
from outrider_export.onnx.graph import find_head
from outrider_export.sources.gguf_values import of_groups

BLOCK = 32
ZERO = 128  # the code of 0 in 8 bits
_ALL = "export with --draft-vocab all."


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


def cut_output(weights: OnnxWeights, token_ids: NDArray[np.int32]) -> None:
    """Cut the logits to `token_ids`, int32 [n], in this order. The embedding is not cut, even if both are tied.

    Raises:
        ExportError: if the nodes that make the logits are unknown.
    """
    graph = weights.model.graph
    head = find_head(graph)
    logits = next(value for value in graph.output if value.name == "logits")
    width = int(logits.type.tensor_type.shape.dim[2].dim_value)
    if head.op_type == "MatMulNBits":
        # Weights, scales, zero points and a bias; a weight's column (input 4) is the same for all rows.
        for i in (1, 2, 3, 5):
            _cut(weights, head, i, width, token_ids)
        next(each for each in head.attribute if each.name == "N").i = len(token_ids)
    else:
        _cut(weights, head, 1, width, token_ids, axis=0 if head.op_type == "FusedMatMul" else 1)
    names = _follow(weights, head, width, token_ids)
    for value in [value for value in graph.value_info if value.name in names]:
        graph.value_info.remove(value)  # their shapes have changed
    logits.type.tensor_type.shape.dim[2].dim_value = len(token_ids)


def _follow(weights: OnnxWeights, head: Any, width: int, token_ids: NDArray[np.int32]) -> set[str]:
    """Cut constants between the product and the logits, such as a bias. Returns the names of the values on the way."""
    names = {head.output[0]}
    for node in weights.model.graph.node:  # in the order in which they run
        if node is head or names.isdisjoint(node.input):
            continue
        names.update(node.output)
        for i, name in enumerate(node.input):
            if name in weights and weights.shape(name)[-1:] == (width,):
                _cut(weights, node, i, width, token_ids, axis=len(weights.shape(name)) - 1)
    return names


def _cut(
    weights: OnnxWeights, node: Any, index: int, width: int, token_ids: NDArray[np.int32], axis: int | None = None
) -> None:
    """Cut input `index` of `node`, if it has one, to some of its `width` rows along `axis`.

    Without an axis, rows are the first dimension of any shape.
    """
    if len(node.input) <= index or not (name := node.input[index]):
        return
    if name not in weights:
        raise ExportError(f"The draft model's output matrix is made by other nodes, which cannot be cut: {_ALL}")
    array = weights.read(name)
    if axis is None:
        shape = (-1,) if array.ndim == 1 else (len(token_ids), *array.shape[1:])
        array = array.reshape(width, -1)[token_ids].reshape(shape)
    else:
        array = np.take(array, token_ids, axis)
    node.input[index] = weights.put(f"{name}.proposed", np.ascontiguousarray(array))


def _pieces(matrix: NDArray[Any]) -> Iterator[slice]:
    step = max(1, PIECE // (matrix.itemsize * matrix[0].size))
    return (slice(begin, begin + step) for begin in range(0, len(matrix), step))


def in_blocks(rows: NDArray[Any], block: int) -> NDArray[np.float32]:
    """float32 [rows, blocks, block], padded with zeros."""
    values, missing = rows.astype(np.float32, copy=False), -rows.shape[1] % block
    return (np.pad(values, ((0, 0), (0, missing))) if missing else values).reshape(len(rows), -1, block)
