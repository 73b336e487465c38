"""The graphs of feed-forward parts: dense ones, mixtures of experts, and both beside each other.

feed_forward = FeedForward(decoder, weights, project, matrix, norm)
made = feed_forward.of(3, layer, read, stream)      # float32 [batch, tokens, hidden]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.models.backends.mixture import Router, clamped_mixture, mixture
from outrider.models.backends.nodes import floats, ints, silu
from outrider_export.direct.decoder import Decoder, Layer
from outrider_export.direct.experts import (
    BESIDE,
    CHOICE,
    EXPERT_SCALES,
    GATE,
    ROUTER,
    ROUTER_SCALE,
    SHARED_GATE,
    STEEPNESS,
    UP,
    Experts,
)
from outrider_export.direct.nodes import rms_norm
from outrider_export.direct.weights import Weights, layer_name


@dataclass(frozen=True)
class FeedForward:
    """project: the product with a matrix of a layer, by its number and the matrix's name. matrix: the matrix itself, by
    its whole name, for so many experts, times a factor. norm: a norm of the last axis, by its whole name.
    """

    decoder: Decoder
    weights: Weights
    project: Callable[[int, str, ov.Node], ov.Node]
    matrix: Callable[[str, int, float], ov.Node]
    norm: Callable[[str, ov.Node], ov.Node]

    def of(self, i: int, layer: Layer, x: ov.Node, stream: ov.Node) -> ov.Node:
        """What the feed-forward part of layer i makes of x, which is the residual stream after a norm."""
        if layer.experts is None:
            return self._dense(i, x)
        if layer.experts.shared == "beside":
            return self._beside(i, layer.experts, x, stream)
        bias, choice = (self.weights.vector(f"{layer_name(i, part)}.bias") for part in (ROUTER, CHOICE))
        made = self._experts(i, layer.experts, x, Router(ops.constant(self._router(i)), bias, choice))
        if not layer.experts.shared:
            return made
        made = ops.add(made, self._shared(i, layer.experts, x))
        return ops.multiply(made, ops.constant(np.float32(0.5))) if layer.experts.shared == "averaged" else made

    def activated(self, gate: ov.Node) -> ov.Node:
        """The decoder's activation."""
        if self.decoder.activation == "silu":
            return silu(gate)
        if self.decoder.activation == "relu2":
            return ops.multiply(ops.relu(gate), ops.relu(gate))
        return ops.gelu(gate, "TANH" if self.decoder.activation == "gelu_tanh" else "ERF")

    def _dense(self, i: int, x: ov.Node) -> ov.Node:
        if self.decoder.arch.ungated:
            return self.project(i, "mlp.down_proj", self.activated(self.project(i, "mlp.up_proj", x)))
        gate = self.project(i, "mlp.gate_proj", x)
        if (cutoff := self.decoder.layers[i].cutoff) is not None:
            gate = _largest(gate, cutoff)
        return self.project(i, "mlp.down_proj", ops.multiply(self.activated(gate), self.project(i, "mlp.up_proj", x)))

    def _router(self, i: int) -> NDArray[np.float32]:
        return self.weights.matrix(layer_name(i, ROUTER)).read(slice(None))

    def _beside(self, i: int, experts: Experts, x: ov.Node, stream: ov.Node) -> ov.Node:
        """A dense part and experts, each with norms of its own; see `Experts.shared`."""
        before, after, after_dense = (layer_name(i, name) for name in BESIDE)
        columns = self.weights.numbers(f"{layer_name(i, ROUTER_SCALE)}.weight", experts.hidden)
        scales = self.weights.numbers(f"{layer_name(i, EXPERT_SCALES)}.weight", experts.count)
        matrix = (self._router(i) * columns * np.float32(experts.hidden**-0.5)).astype(np.float32)
        router = Router(ops.constant(matrix), scales=scales, read=rms_norm(stream, None, self.decoder.eps))
        made = self._experts(i, experts, self.norm(before, stream), router)
        return ops.add(self.norm(after_dense, self._dense(i, x)), self.norm(after, made))

    def _experts(self, i: int, experts: Experts, x: ov.Node, router: Router) -> ov.Node:
        def matrix(part: str) -> ov.Node:
            if part == GATE and not experts.gated:
                return self.matrix(layer_name(i, UP), experts.count, STEEPNESS)
            return self.matrix(layer_name(i, part), experts.count, 1.0)

        if not experts.clamped:
            return mixture(experts, x, router, matrix, self.activated if experts.gated else silu)
        return clamped_mixture(
            experts, x, router, matrix, lambda part: self.weights.bias_of_experts(layer_name(i, part), experts)
        )

    def _shared(self, i: int, experts: Experts, x: ov.Node) -> ov.Node:
        """What the expert gives that all tokens have."""
        made = self._dense(i, x)
        if experts.shared in ("added", "averaged"):
            return made
        gate = self.weights.numbers(f"{layer_name(i, SHARED_GATE)}.weight", experts.hidden)
        return ops.multiply(made, ops.sigmoid(ops.matmul(x, floats(gate.reshape(1, -1)), False, True)))


def _largest(gate: ov.Node, cutoff: float) -> ov.Node:
    """What numbers exceed their mean by more than `cutoff` standard deviations, and 0 for others.

    Source: Transformers 5.5, models/gemma3n/modeling_gemma3n.py, `_gaussian_topk`.
    """
    mean = ops.reduce_mean(gate, ints(-1), True)
    off = ops.subtract(gate, mean)
    deviation = ops.sqrt(ops.reduce_mean(ops.multiply(off, off), ints(-1), True))
    limit = ops.add(mean, ops.multiply(deviation, floats(np.full((1, 1, 1), cutoff))))
    return ops.relu(ops.subtract(gate, limit))
