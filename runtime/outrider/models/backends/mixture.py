"""The graph of a mixture of experts.

Each token is multiplied with the matrices of all experts, and a token's weights of most of them are zero. OpenVINO
finds this form (`ConvertTiledMoeBlockToGatherMatmuls`), and computes the chosen experts alone, with weights in 8 or 4
bits as they are. So the form is kept to, as optimum-intel writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.models.backends.nodes import END, floats, integer, ints, transposed

GATE, UP, DOWN = "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"  # of all experts
# Both in one tensor: of each expert, gate's rows and then up's; of clamped ones, they take turns.
GATE_UP = "mlp.experts.gate_up_proj"
# OpenVINO knows the form with a gate only. up · SiLU(n · up) / n is ReLU(up)² but for 0.46 / n² at most, so experts
# without a gate are those whose gate is up, n times as large. A power of two loses nothing.
STEEPNESS = 4096.0
_ALPHA, _LIMIT = 1.702, 7.0  # of gpt-oss


@dataclass(frozen=True)
class Experts:
    """A mixture of experts.

    active: experts of a token. size: numbers between an expert's products. router: how scores become weights:
    "softmax" of all experts and then the best ones, "top_softmax" of the best ones alone, or "sigmoid" of each; with
    "input", the sigmoid of the best one multiplies what the expert reads, not what it gives. shared: what a dense part,
    the shared expert, gives beside them: "" if there is none, "added", "averaged" with them, "gated" by a sigmoid, or
    "beside": it and the experts have norms of their own around them, and the router reads a row before any norm.
    normalised: whether the weights of a token are divided by their sum, to which `eps` is added. scale: of weights.
    clamped: between its products, an expert computes (up + 1) · gate · sigmoid(1.702 · gate), both limited, as gpt-oss.
    gated: whether an expert has a gate; one without computes down(relu(up)²), see `STEEPNESS`.
    groups: of neighbours, of which the best `active_groups` are chosen first: by their best score, or for "sigmoid" by
    the sum of their two best.
    """

    hidden: int
    count: int
    active: int
    size: int
    router: str
    normalised: bool = False
    eps: float = 0.0
    scale: float = 1.0
    shared: str = ""
    clamped: bool = False
    groups: int = 1
    active_groups: int = 1
    gated: bool = True

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of the experts' matrices, by their names in a layer: those of all experts, one below the other."""
        wide, narrow = (self.count * self.size, self.hidden), (self.count * self.hidden, self.size)
        if self.clamped:
            return {GATE_UP: (2 * wide[0], self.hidden), DOWN: narrow}
        return {GATE: wide, UP: wide, DOWN: narrow} if self.gated else {UP: wide, DOWN: narrow}


@dataclass(frozen=True)
class Router:
    """matrix: float32 [experts, hidden]. bias: of scores, and choice: added to them only to choose; both [experts].

    scales: float32 [experts], of an expert's weight in the end. read: what it scores, if not what experts read.
    """

    matrix: ov.Node | ov.Output
    bias: NDArray[np.float32] | None = None
    choice: NDArray[np.float32] | None = None
    scales: NDArray[np.float32] | None = None
    read: ov.Node | None = None


def mixture(
    experts: Experts,
    x: ov.Node,
    router: Router,
    matrix: Callable[[str], ov.Node],
    activate: Callable[[ov.Node], ov.Node],
) -> ov.Node:
    """What a mixture makes of x float32 [batch, tokens, hidden].

    matrix: all experts' matrices of a name, float32 [experts, rows, columns]; as the gate of experts without one, up's,
    `STEEPNESS` times as large. activate: SiLU for these.
    """
    rows = ops.reshape(x, ints(-1, experts.hidden), special_zero=False)
    chosen, weights = _route(experts, rows, router)
    if experts.router == "input":
        rows = ops.multiply(rows, ops.sigmoid(weights))
        weights = ops.broadcast(floats(1), ops.shape_of(weights, "i64")).output(0)
    every = _repeated(experts, rows)
    gate = activate(ops.matmul(every, matrix(GATE), False, True))
    made = ops.multiply(gate, ops.matmul(every, matrix(UP), False, True))
    return _summed(experts, ops.matmul(made, matrix(DOWN), False, True), x, chosen, weights)


def clamped_mixture(
    experts: Experts,
    x: ov.Node,
    router: Router,
    matrix: Callable[[str], ov.Node],
    bias: Callable[[str], NDArray[np.float32]],
) -> ov.Node:
    """The same of clamped experts. bias: that of a name, float32 [experts, 1, rows]."""
    rows = ops.reshape(x, ints(-1, experts.hidden), special_zero=False)
    chosen, weights = _route(experts, rows, router)
    both = ops.add(ops.matmul(_repeated(experts, rows), matrix(GATE_UP), False, True), ops.constant(bias(GATE_UP)))
    gate, up = (ops.slice(both, ints(first), ints(END), ints(2), ints(2)) for first in (0, 1))
    up = ops.add(ops.clamp(up, -_LIMIT, _LIMIT), floats(np.ones((1, 1, 1))))
    gate = ops.minimum(gate, floats(np.full((1, 1, 1), _LIMIT)))
    made = ops.multiply(up, ops.swish(gate, floats(_ALPHA)))
    made = ops.add(ops.matmul(made, matrix(DOWN), False, True), ops.constant(bias(DOWN)))
    return _summed(experts, made, x, chosen, weights)


def _repeated(experts: Experts, rows: ov.Node) -> ov.Node:
    """Rows for each expert, [experts, rows, hidden]."""
    every = ops.tile(rows, ints(experts.count, 1))
    return ops.reshape(every, ints(experts.count, -1, experts.hidden), special_zero=False)


def _route(experts: Experts, rows: ov.Node, router: Router) -> tuple[ov.Output, ov.Output]:
    """The chosen experts of each row, int32 [rows, active], and their weights, float32."""
    if router.read is not None:
        rows = ops.reshape(router.read, ints(-1, experts.hidden), special_zero=False)
    scores = ops.matmul(rows, router.matrix, False, True)
    if router.bias is not None:
        scores = ops.add(scores, ops.constant(router.bias.reshape(1, -1)))
    active, axis = integer(experts.active), ints(-1)
    if experts.router == "softmax":
        scores = ops.softmax(scores, -1)
    elif experts.router == "sigmoid":
        scores = ops.sigmoid(scores)
    choice = router.choice
    judged = scores if choice is None else ops.add(scores, ops.constant(choice.reshape(1, -1)))
    if experts.active_groups < experts.groups:
        judged = _in_best_groups(experts, judged)
    best = ops.topk(judged, active, -1, "max", "value", "i32")
    values = best.output(0) if choice is None else ops.gather_elements(scores, best.output(1), 1).output(0)
    if experts.router == "top_softmax":
        values = ops.softmax(values, -1).output(0)
    if experts.normalised:
        total = ops.reduce_sum(values, axis, True)
        total = ops.add(total, floats(experts.eps)) if experts.eps else total
        values = ops.divide(values, total).output(0)
    scale = experts.scale if experts.gated else experts.scale / STEEPNESS
    if scale != 1:
        values = ops.multiply(values, floats(scale)).output(0)
    if router.scales is not None:
        scales = ops.gather(ops.constant(router.scales), best.output(1), integer(0))
        values = ops.multiply(values, scales).output(0)
    return best.output(1), values


def _in_best_groups(experts: Experts, scores: ov.Node) -> ov.Node:
    """Scores float32 [rows, experts], with zeros in groups that are not chosen.

    Source: Transformers 5.5, `route_tokens_to_experts` of models/deepseek_v2 and deepseek_v3.
    """
    zero, one, axis = (integer(number) for number in (0, 1, 2))
    apart = ops.reshape(scores, ints(-1, experts.groups, experts.count // experts.groups), special_zero=False)
    num_best = integer(2 if experts.router == "sigmoid" else 1)
    best = ops.topk(apart, num_best, 2, "max", "value", "i32").output(0)
    of_groups = ops.reduce_sum(best, axis, False)
    chosen = ops.topk(of_groups, integer(experts.active_groups), 1, "max", "value", "i32").output(1)
    none = ops.broadcast(floats(0), ops.shape_of(of_groups, "i64"))
    ones = ops.broadcast(floats(1), ops.shape_of(chosen, "i64"))
    mask = ops.scatter_elements_update(none, chosen, ones, one)
    kept = ops.multiply(apart, ops.unsqueeze(mask, axis))
    count = ops.gather(ops.shape_of(scores, "i64"), ints(0), zero)
    return ops.reshape(kept, ops.concat([count, ints(experts.count)], 0), special_zero=False)


def _summed(experts: Experts, made: ov.Node, x: ov.Node, chosen: ov.Output, weights: ov.Output) -> ov.Node:
    """The weighted sum of what experts made, float32 [experts, rows, hidden], in the shape of x."""
    zero, last = integer(0), integer(-1)
    made = ops.reshape(made, ints(0, -1, 0), special_zero=True)
    count = ops.gather(ops.shape_of(chosen, "i64"), ints(0), zero)
    none = ops.broadcast(floats(0), ops.concat([count, ints(experts.count)], 0))
    spread = ops.scatter_elements_update(none, chosen, weights, integer(1))
    by_expert = transposed(spread, 1, 0)
    by_expert = ops.unsqueeze(ops.reshape(by_expert, ints(0, -1), special_zero=True), last)
    total = ops.reduce_sum(ops.multiply(made, by_expert), ints(0), False)
    return ops.reshape(total, ops.shape_of(x, "i64"), special_zero=False)
