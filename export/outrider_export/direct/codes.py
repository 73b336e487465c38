"""Codes of rounded weights in 8 and 4 bits, constants of them: in 4 bits two a byte, the first in the lower half."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_export.sources.gguf_values import of_groups

_LARGEST = 255  # code of 8 bits


def pack(codes: NDArray[np.uint8]) -> Any:
    """A constant of the type `u4` from codes in one byte each."""
    import openvino

    tensor = openvino.Tensor(paired(codes.reshape(-1)), openvino.Shape(list(codes.shape)), openvino.Type.u4)
    # A copy: a constant that shares the memory does not keep it alive.
    return openvino.op.Constant(tensor, shared_memory=False)


def matrix_node(values: NDArray[np.float32], weights: str) -> Any:
    """A matrix float32 [rows, columns], or those of experts [experts, rows, columns], made of constants.

    weights: "int8", with a scale and a zero point for each row, as in nncf's INT8_ASYM; "fp16" or "fp32".
    """
    from openvino import opset13 as ops

    if weights == "fp32":
        return ops.constant(values)
    if weights == "fp16":
        return ops.convert(ops.constant(values.astype(np.float16)), "f32")
    flat = values.reshape(-1, values.shape[-1])
    made = rounded(flat, flat.shape[1], _LARGEST)
    codes, zero_points, scales = (ops.constant(each.reshape(*values.shape[:-1], -1)) for each in made)
    centred = ops.subtract(ops.convert(codes, "f16"), ops.convert(zero_points, "f16"))
    return ops.convert(ops.multiply(centred, scales), "f32")


def paired(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes of 4 bits [..., n], two a byte [..., ⌈n / 2⌉]."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], -1)
    pairs = np.ascontiguousarray(codes).view("<u2")  # the first code is in the lower byte
    packed: NDArray[np.uint8] = (pairs | pairs >> 4).astype(np.uint8)
    return packed


def rounded(
    values: NDArray[np.float32], group: int, largest: int, *, in_place: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float16]]:
    """Codes uint8 [rows, columns] from 0 to `largest`, zero points uint8 and scales float16, both [rows, groups].

    values: float32 [rows, columns], about scale · (code − zero point). group: columns that share a scale. in_place: the
    values are not needed any more, and what is in the processor's cache already is overwritten.
    """
    grouped = values.reshape(len(values), -1, group)
    lowest = np.minimum(of_groups(np.minimum, grouped), 0)[..., None]
    highest = np.maximum(of_groups(np.maximum, grouped), 0)[..., None]
    scales = _rounded_up((highest - lowest) / np.float32(largest))
    steps = np.where(scales == 0, 1, scales).astype(np.float32)
    zero_points = np.clip(np.rint(-lowest / steps), 0, largest)
    codes = np.multiply(grouped, 1 / steps, out=grouped if in_place else None)
    codes += zero_points
    np.rint(codes, out=codes)
    np.clip(codes, 0, largest, out=codes)
    whole = codes.astype(np.uint8).reshape(values.shape)
    return whole, zero_points[..., 0].astype(np.uint8), scales[..., 0]


def _rounded_up(scales: NDArray[np.float32]) -> NDArray[np.float16]:
    """In float16, and no smaller, so that no value is beyond the largest code."""
    rounded = scales.astype(np.float16)
    return np.where(rounded < scales, np.nextafter(rounded, np.float16(np.inf)), rounded)
