"""Writes the weights of a drafter to an IR with one output for each; see `outrider.models.backends.heads.weights`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.models.backends.mixture import DOWN, GATE, UP
from outrider_export.direct.codes import matrix_node

EXPERTS = tuple(f".{name}.weight" for name in (GATE, UP, DOWN))
_SMALL = 4096  # numbers of a matrix; compressing fewer saves nothing


def write(path: Path, tensors: Mapping[str, NDArray[np.float32]], weights: str) -> None:
    """Write tensors by their names.

    weights: the format of matrices, see `matrix_node`. All other tensors are float32.
    """
    results = []
    for name, values in tensors.items():
        is_matrix = (values.ndim == 2 or name.endswith(EXPERTS)) and values.size > _SMALL
        made = ops.result(matrix_node(values, weights) if is_matrix else ops.constant(values))
        made.set_friendly_name(f"weights/{name}")
        made.output(0).set_names({name})
        results.append(made)
    path.parent.mkdir(parents=True, exist_ok=True)
    ov.save_model(ov.Model(results, []), path, compress_to_fp16=False)
