"""Norms of rows, in the form that OpenVINO's passes find."""

from __future__ import annotations

import numpy as np
import openvino as ov
from numpy.typing import ArrayLike
from openvino import opset13 as ops

from outrider.models.backends.nodes import floats, ints


def rms_norm(x: ov.Node | ov.Output, weight: ArrayLike | None, eps: float) -> ov.Node:
    """x / √(mean(x²) + eps) · weight, over the last axis. weight: None for ones."""
    ones = [1] * rank_of(x)
    squares = ops.power(x, floats(np.full(ones, 2)))
    means = ops.add(ops.reduce_mean(squares, ints(-1), True), floats(np.full(ones, eps)))
    normed = ops.multiply(x, ops.divide(floats(np.ones(ones)), ops.sqrt(means)))
    if weight is None:
        return normed
    return ops.multiply(normed, floats(np.reshape(weight, (*ones[:-1], -1))))


def rank_of(x: ov.Node | ov.Output) -> int:
    """How many axes a node's only output has, or an output."""
    return len((x.output(0) if isinstance(x, ov.Node) else x).get_partial_shape())
