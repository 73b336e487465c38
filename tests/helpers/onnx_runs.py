"""Runs of models in ONNX after an empty cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime


def run_onnx(path: Path, token_ids: Sequence[int], *names: str, head_size: int = 16, **more: Any) -> list[Any]:
    """Outputs without their batch; by default logits float32 [rows, vocabulary]. more: inputs, also with defaults."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    wanted = {port.name: port.shape for port in session.get_inputs()}
    ids = np.array([token_ids])
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]} | more
    for name, shape in wanted.items():
        if name.startswith("past"):
            size = shape[3] if isinstance(shape[3], int) else head_size
            inputs[name] = np.zeros((1, shape[1], 0, size), np.float32)
    given = {name: array for name, array in inputs.items() if name in {*wanted, *more}}
    return [each[0] for each in session.run(names or ["logits"], given)]
