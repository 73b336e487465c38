"""The graph of a mixture of experts.

Each token is multiplied with the matrices of all experts, and a token's weights of most of them are zero. OpenVINO
finds this form (`ConvertTiledMoeBlockToGatherMatmuls`), and computes the chosen experts alone, with weights in 8 or 4
bits as they are. So the form is kept to, as optimum-intel writes it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.models.backends.taps import ints
from outrider_export.direct.experts import DOWN, GATE, UP, Experts


def mixture(
    experts: Experts,
    x: ov.Node,
    router: tuple[NDArray[np.float32], NDArray[np.float32] | None],
    matrix: Callable[[str], ov.Node],
    activate: Callable[[ov.Node], ov.Node],
) -> ov.Node:
    """What a mixture makes of x float32 [batch, tokens, hidden].

    router: its matrix [experts, hidden], and a bias [experts] that only chooses, or None. matrix: all experts' matrices
    of a name, float32 [experts, rows, columns].
    """
    rows = ops.reshape(x, ints(-1, experts.hidden), special_zero=False)
    chosen, weights = _route(experts, rows, *router)
    every = ops.tile(rows, ints(experts.count, 1))
    every = ops.reshape(every, ints(experts.count, -1, experts.hidden), special_zero=False)
    gate = activate(ops.matmul(every, matrix(GATE), False, True))
    made = ops.multiply(gate, ops.matmul(every, matrix(UP), False, True))
    return _summed(experts, ops.matmul(made, matrix(DOWN), False, True), x, chosen, weights)


def _route(
    experts: Experts, rows: ov.Node, matrix: NDArray[np.float32], bias: NDArray[np.float32] | None
) -> tuple[ov.Output, ov.Output]:
    """The chosen experts of each row, int32 [rows, active], and their weights, float32."""
    scores = ops.matmul(rows, ops.constant(matrix), False, True)
    active, axis = ops.constant(np.int64(experts.active)), ints(-1)
    if experts.router == "softmax":
        scores = ops.softmax(scores, -1)
    elif experts.router == "sigmoid":
        scores = ops.sigmoid(scores)
    judged = scores if bias is None else ops.add(scores, ops.constant(bias.reshape(1, -1)))
    best = ops.topk(judged, active, -1, "max", "value", "i32")
    values = best.output(0) if bias is None else ops.gather_elements(scores, best.output(1), 1).output(0)
    if experts.router == "top_softmax":
        values = ops.softmax(values, -1).output(0)
    if experts.normalised:
        total = ops.reduce_sum(values, axis, True)
        total = ops.add(total, ops.constant(np.float32(experts.eps))) if experts.eps else total
        values = ops.divide(values, total).output(0)
    if experts.scale != 1:
        values = ops.multiply(values, ops.constant(np.float32(experts.scale))).output(0)
    return best.output(1), values


def _summed(experts: Experts, made: ov.Node, x: ov.Node, chosen: ov.Output, weights: ov.Output) -> ov.Node:
    """The weighted sum of what experts made, float32 [experts, rows, hidden], in the shape of x."""
    zero, last = ops.constant(np.int64(0)), ops.constant(np.int64(-1))
    made = ops.reshape(made, ints(0, -1, 0), special_zero=True)
    count = ops.gather(ops.shape_of(chosen, "i64"), ints(0), zero)
    none = ops.broadcast(ops.constant(np.float32(0)), ops.concat([count, ints(experts.count)], 0))
    spread = ops.scatter_elements_update(none, chosen, weights, ops.constant(np.int64(1)))
    by_expert = ops.transpose(spread, ops.constant(np.array([1, 0], np.int32)))
    by_expert = ops.unsqueeze(ops.reshape(by_expert, ints(0, -1), special_zero=True), last)
    total = ops.reduce_sum(ops.multiply(made, by_expert), ints(0), False)
    return ops.reshape(total, ops.shape_of(x, "i64"), special_zero=False)
