"""Restores the exact minima of unconverted GGUF weights, which openvino-genai's reader (2026.4) rounds.

A group of 32 Q4_1 or Q4_K weights is scale * code + minimum. The reader turns the minimum into a zero point of 4 bits,
scale * (code - zero_point), with an error of up to half a step: 8 % of a matrix, as much as the file's own quantisation
loses. OpenVINO accepts zero points that are no integers, but then computes without 8-bit activations, which takes 1.6
times as long for two rows and twice as long from five on (SmolLM2, CPU). The rounding error adds leftover[row, group] *
sum(x[group]) to a product with x. So the leftovers become further columns of the same matrix, also in 4 bits, and the
sums of x's groups are appended to x. That is 1/32 more columns and 5 to 10 % more time, and reduces the error from 8 %
to 0.5 %.

An embedding is not multiplied, so its zero points become float16.

Source: block_q4_1 and block_q4_K in ggml/src/ggml-common.h.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.errors import ExportError
from outrider_export.direct.codes import pack, rounded, unpack
from outrider_export.direct.own_codes import GROUP, LARGEST
from outrider_export.sources.gguf_file import GGUFHeader

TYPES = ("Q4_1", "Q4_K")


@dataclass(frozen=True)
class _Matrix:
    """A matrix in groups, as the reader writes it: Multiply(Subtract(codes, zero points), scales), all Constants."""

    multiply: Any  # the node with its weights, [rows, groups, GROUP], before Reshape and Convert
    codes: Any  # u4 [rows, groups, GROUP]
    zero_points: Any  # u4 [rows, groups, 1]
    scales: Any  # float16 [rows, groups, 1]


def has_minima(header: GGUFHeader) -> bool:
    """Whether the file has matrices whose minima the reader rounds."""
    return any(tensor.type in TYPES for tensor in header.tensors.values())


def restore_minima(model: ov.Model, header: GGUFHeader) -> None:
    """Correct every matrix of the file at `header.path` whose minima were rounded. Works in source.

    Raises:
        ExportError: if one of them is not in the model in the expected form.
    """
    minima: dict[bytes, NDArray[np.float32]] = {}
    names: dict[bytes, str] = {}
    for name, scales, values in _read_minima(header):
        key = _key(scales)
        names[key] = name
        if not np.array_equal(minima.setdefault(key, values), values):
            raise ExportError(f"{header.path}: {name} has another matrix's scales. Use --weights int8 instead.")
    widened: dict[tuple[str, int], Any] = {}  # by the multiplied input: q, k and v have the same x
    for matrix in list(_matrices(model)):
        key = _key(matrix.scales.data[..., 0])
        if key in minima:
            _restore(matrix, minima[key], widened)
            names.pop(key, None)
    for name in names.values():
        raise ExportError(f"{header.path}: openvino-genai has changed {name}. Use --weights int8 instead.")
    model.validate_nodes_and_infer_types()


def _key(scales: NDArray[np.float16]) -> bytes:
    """Identifies a matrix by its scales: the reader drops names and does not change scales."""
    return repr(scales.shape).encode() + hashlib.sha256(np.ascontiguousarray(scales).tobytes()).digest()


def _matrices(model: ov.Model) -> Iterator[_Matrix]:
    for multiply in model.get_ops():
        if multiply.get_type_name() != "Multiply":
            continue
        subtract, scales = (multiply.input_value(i).get_node() for i in (0, 1))
        if subtract.get_type_name() != "Subtract" or scales.get_type_name() != "Constant":
            continue
        codes, zero_points = (_after_convert(subtract.input_value(i).get_node()) for i in (0, 1))
        if codes.get_type_name() == "Constant" and codes.get_element_type().get_type_name() == "u4":
            yield _Matrix(multiply, codes, zero_points, scales)


def _after_convert(node: Any) -> Any:
    return node.input_value(0).get_node() if node.get_type_name() == "Convert" else node


def _restore(matrix: _Matrix, minima: NDArray[np.float32], widened: dict[tuple[str, int], Any]) -> None:
    """Correct one matrix, whose minima are float32 [rows, groups], wherever it is used."""
    (reshape,) = (port.get_node() for port in matrix.multiply.output(0).get_target_inputs())
    (convert,) = (port.get_node() for port in reshape.output(0).get_target_inputs())
    weights = None
    for port in list(convert.output(0).get_target_inputs()):
        product = port.get_node()
        if product.get_type_name() != "MatMul":
            continue
        weights = weights or _widen_weights(matrix, minima)
        x = product.input_value(0)
        source = (x.get_node().get_name(), x.get_index())
        if source not in widened:
            widened[source] = with_sums(x, minima.shape[1])
        product.input(0).replace_source_output(widened[source].output(0))
        product.input(1).replace_source_output(weights.output(0))
    if convert.output(0).get_target_inputs():  # an embedding, perhaps tied to the output matrix
        _make_zero_points_exact(matrix, minima)


def with_sums(x: ov.Output, num_groups: int) -> Any:
    """x [.., .., columns] with the sums of its groups appended, and zeros up to a whole group."""
    grouped = ops.reshape(x, np.array([0, 0, num_groups, GROUP], dtype=np.int64), special_zero=True)
    sums = ops.reduce_sum(grouped, np.array([-1], dtype=np.int64), keep_dims=False)
    if padding := -num_groups % GROUP:
        begin, end = np.zeros(3, dtype=np.int64), np.array([0, 0, padding], dtype=np.int64)
        sums = ops.pad(sums, begin, end, "constant", np.float32(0))
    return ops.concat([x, sums], -1)


def _widen_weights(matrix: _Matrix, minima: NDArray[np.float32]) -> Any:
    """The matrix float32 [rows, columns] with the leftovers of its minima as further columns."""
    zero_points, scales = unpack(matrix.zero_points), matrix.scales.data
    rows, num_groups = minima.shape
    leftover = minima + scales[..., 0].astype(np.float32) * zero_points[..., 0]
    leftover = np.pad(leftover, ((0, 0), (0, -num_groups % GROUP)))
    more_codes, more_zero_points, more_scales = rounded(leftover, GROUP, LARGEST)
    codes = pack(np.concatenate([unpack(matrix.codes), more_codes.reshape(rows, -1, GROUP)], 1))
    zero_points = pack(np.concatenate([zero_points, more_zero_points[..., None]], 1))
    scales = np.concatenate([scales, more_scales[..., None]], 1)
    weights = ops.subtract(ops.convert(codes, "f16"), ops.convert(zero_points, "f16"))
    weights = ops.multiply(weights, ops.constant(scales))
    shape = np.array([rows, scales.shape[1] * GROUP], dtype=np.int64)
    return ops.convert(ops.reshape(weights, ops.constant(shape), special_zero=False), "f32")


def _make_zero_points_exact(matrix: _Matrix, minima: NDArray[np.float32]) -> None:
    scales = matrix.scales.data.astype(np.float32)
    exact = np.divide(-minima[..., None], scales, out=np.zeros_like(scales), where=scales != 0)
    largest = float(np.finfo(np.float16).max)
    constant = ops.constant(np.clip(exact, -largest, largest).astype(np.float16))
    matrix.multiply.input_value(0).get_node().input(1).replace_source_output(constant.output(0))


def _read_minima(header: GGUFHeader) -> Iterator[tuple[str, NDArray[np.float16], NDArray[np.float32]]]:
    """Name, scales float16 and minima float32 [rows, groups] of the file's matrices, rows in the reader's order."""
    read = {"Q4_1": _read_q4_1, "Q4_K": _read_q4_k}
    for name, tensor in header.tensors.items():
        if tensor.type not in TYPES:
            continue
        rows = tensor.shape[0]
        blocks = tensor.stored().reshape(rows, -1, tensor.block_bytes)
        scales, minima = read[tensor.type](blocks)
        order = _row_order(header, name, rows)
        yield name, scales.reshape(rows, -1)[order], minima.reshape(rows, -1)[order]


def _row_order(header: GGUFHeader, name: str, rows: int) -> NDArray[np.int64]:
    """llama.cpp interleaves the halves of each head's q and k in llama files; the reader puts them back."""
    order = np.arange(rows)
    keys = {"attn_q.weight": ".attention.head_count", "attn_k.weight": ".attention.head_count_kv"}
    key = keys.get(name.split(".", 2)[-1])
    if header.architecture != "llama" or key is None:
        return order
    heads = header.integer(".attention.head_count", least=1)
    heads = header.integer(key, heads, least=1)
    return order.reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _read_q4_1(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """Of uint8 [rows, blocks, 20]: scale and minimum, float16 both, before the codes."""
    return _halves(blocks, 0), _halves(blocks, 2).astype(np.float32)


def _read_q4_k(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """Of uint8 [rows, blocks, 144]: 8 groups a block, with scales and minima of 6 bits and float16 units for both."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], -1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], -1)
    of_scales, of_minima = (_halves(blocks, at).astype(np.float32) for at in (0, 2))
    return (of_scales * scales).astype(np.float16), -of_minima * minima


def _halves(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float16]:
    """The float16 [rows, blocks, 1] at byte `at` of each block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)
