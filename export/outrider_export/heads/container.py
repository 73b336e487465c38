"""Writes the weights of a drafter to an IR with one output for each; see `outrider.models.backends.heads.weights`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.models.backends.mixture import DOWN, GATE, UP
from outrider_export.direct.codes import rounded

EXPERTS = tuple(f".{name}.weight" for name in (GATE, UP, DOWN))
_LARGEST = 255  # code of 8 bits
_SMALL = 4096  # numbers of a matrix; compressing fewer saves nothing


def write(
    path: Path, tensors: Mapping[str, NDArray[np.float32]], shared: Mapping[str, ov.Output], weights: str
) -> None:
    """Write tensors, and nodes that come from another model, by their names.

    weights: the format of matrices, "int8", "fp16" or "fp32". All other tensors are float32.
    """
    outputs = dict(shared)
    for name, values in tensors.items():
        is_matrix = (values.ndim == 2 or name.endswith(EXPERTS)) and values.size > _SMALL
        outputs[name] = (_compressed(values, weights) if is_matrix else ops.constant(values)).output(0)
    results = []
    for name, output in outputs.items():
        made = ops.result(output)
        made.set_friendly_name(f"weights/{name}")
        made.output(0).set_names({name})
        results.append(made)
    path.parent.mkdir(parents=True, exist_ok=True)
    ov.save_model(ov.Model(results, []), path, compress_to_fp16=False)


def _compressed(values: NDArray[np.float32], weights: str) -> ov.Node:
    """A matrix float32 [rows, columns], or those of experts [experts, rows, columns].

    In int8, each row has a scale and a zero point, as in nncf's INT8_ASYM.
    """
    if weights == "fp32":
        return ops.constant(values)
    if weights == "fp16":
        return ops.convert(ops.constant(values.astype(np.float16)), "f32")
    flat = values.reshape(-1, values.shape[-1])
    codes, zero_points, scales = (
        each.reshape(*values.shape[:-1], -1) for each in rounded(flat, flat.shape[1], _LARGEST)
    )
    centred = ops.subtract(ops.convert(ops.constant(codes), "f16"), ops.convert(ops.constant(zero_points), "f16"))
    return ops.convert(ops.multiply(centred, ops.constant(scales)), "f32")
