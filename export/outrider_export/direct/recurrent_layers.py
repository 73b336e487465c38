"""The graphs of layers with a state: LFM2's short convolution, Qwen3.5's gated delta net, Mamba-2.

    parts = Parts(number, states, project, …)              # of a layer: its place, its matrices and other weights
    found = state_layer(GatedDeltaNet(…), parts, x)        # float32 [batch, tokens, width], as x

Source: Transformers 5.5, modeling_lfm2.py, modeling_qwen3_5.py, modeling_granitemoehybrid.py and
modeling_nemotron_h.py. Of the latter, time steps have the limits of `time_step_limit`, as in its kernels for GPUs;
its code without them takes `time_step_min` as the least, with which the published models were not trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.models.backends.nodes import floats, integer, ints
from outrider_export.direct.nodes import rms_norm
from outrider_export.direct.recurrences import States, causal_convolution, gated_delta_net, selective_ssm
from outrider_export.direct.states import GatedDeltaNet, SelectiveSSM, ShortConvolution, State


@dataclass(frozen=True)
class Parts:
    """What a layer is made of.

    number: of layers of its kind before it. project: the product with one of its matrices, by name. numbers: a tensor
    by name, float32 [count]; numbers_if_any: None if it is missing. eps: of norms.
    """

    number: int
    states: States
    project: Callable[[str, ov.Node], ov.Node]
    numbers: Callable[[str, int], NDArray[np.float32]]
    numbers_if_any: Callable[[str, int], NDArray[np.float32] | None]
    eps: float

    def convolved(self, name: str, x: ov.Node, width: int, kernel: int) -> ov.Node:
        """x float32 [batch, tokens, width] after the layer's convolution."""
        weight = self.numbers(f"{name}.weight", width * kernel).reshape(width, kernel)
        bias = self.numbers_if_any(f"{name}.bias", width)
        return causal_convolution(self.states, f"conv.{self.number}", x, weight, bias)


def state_layer(state: State, parts: Parts, x: ov.Node) -> ov.Node:
    """What a layer with a state gives for x float32 [batch, tokens, width], in the same shape."""
    if isinstance(state, GatedDeltaNet):
        return delta_net_layer(state, parts, x)
    if isinstance(state, SelectiveSSM):
        return ssm_layer(state, parts, x)
    return short_convolution_layer(state, parts, x)


def short_convolution_layer(state: ShortConvolution, parts: Parts, x: ov.Node) -> ov.Node:
    """C · conv(B · u), with B, C and u of one projection."""
    gate, out_gate, u = split(parts.project("conv.in_proj", x), [state.width] * 3)
    mixed = parts.convolved("conv.conv", ops.multiply(gate, u), state.width, state.kernel)
    return parts.project("conv.out_proj", ops.multiply(out_gate, mixed))


def delta_net_layer(state: GatedDeltaNet, parts: Parts, x: ov.Node) -> ov.Node:
    """A gated delta net, whose output is normed by head and then gated."""
    count, size = state.num_heads, state.head_size
    mixed = parts.project("linear_attn.in_proj_qkv", x)
    mixed = ops.swish(parts.convolved("linear_attn.conv1d", mixed, state.conv_width, state.kernel))
    q, k, v = split(mixed, (state.key_width, state.key_width, state.value_width))
    q, k = (_heads(each, state.num_key_heads, state.key_size) for each in (q, k))
    beta = ops.sigmoid(parts.project("linear_attn.in_proj_b", x))
    rate, bias = (parts.numbers(f"linear_attn.{name}", count) for name in ("A_log", "dt_bias"))
    steps = ops.softplus(ops.add(parts.project("linear_attn.in_proj_a", x), _row(bias)))
    decay = ops.multiply(_row(-np.exp(rate)), steps)
    found = gated_delta_net(parts.states, f"recurrent.{parts.number}", q, k, _heads(v, count, size), decay, beta)
    gate = parts.project("linear_attn.in_proj_z", x)
    found = rms_norm(_rows(found, size), parts.numbers("linear_attn.norm.weight", size), parts.eps)
    found = ops.multiply(found, ops.swish(_rows(gate, size)))
    return parts.project("linear_attn.out_proj", ops.reshape(found, ops.shape_of(gate, "i64"), special_zero=False))


def ssm_layer(state: SelectiveSSM, parts: Parts, x: ov.Node) -> ov.Node:
    """Mamba-2, whose output is gated and then normed, as a whole or by group of heads."""
    count, width = state.num_heads, state.inner_width
    gate, mixed, steps = split(parts.project("mamba.in_proj", x), (width, state.conv_width, count))
    mixed = ops.swish(parts.convolved("mamba.conv1d", mixed, state.conv_width, state.kernel))
    inner, b, c = split(mixed, (width, state.group_width, state.group_width))
    inner = _heads(inner, count, state.head_size)
    b, c = (_heads(each, state.num_groups, state.state_size) for each in (b, c))
    rate, bias, skip = (parts.numbers(f"mamba.{name}", count) for name in ("A_log", "dt_bias", "D"))
    steps = ops.softplus(ops.add(steps, _row(bias)))
    if state.limits != (0.0, float("inf")):
        steps = ops.clamp(steps, *state.limits)
    found = selective_ssm(parts.states, f"recurrent.{parts.number}", -np.exp(rate), steps, b, inner, c)
    found = ops.add(found, ops.multiply(inner, floats(skip.reshape(1, 1, -1, 1))))
    found = ops.multiply(ops.reshape(found, ints(0, 0, width), special_zero=True), ops.swish(gate))
    weight = parts.numbers("mamba.norm.weight", width)
    if state.norm_groups == 1:
        return parts.project("mamba.out_proj", rms_norm(found, weight, parts.eps))
    size = width // state.norm_groups
    normed = rms_norm(_heads(found, state.norm_groups, size), np.ones(size, np.float32), parts.eps)
    normed = ops.reshape(normed, ints(0, 0, width), special_zero=True)
    return parts.project("mamba.out_proj", ops.multiply(normed, _row(weight)))


def split(x: ov.Node, sizes: Sequence[int]) -> list[ov.Output]:
    """Parts of the last axis of float32 [batch, tokens, all sizes]."""
    return list(ops.variadic_split(x, integer(2), ints(*sizes)).outputs())


def _heads(x: ov.Node | ov.Output, count: int, size: int) -> ov.Node:
    """[batch, tokens, count, size] of [batch, tokens, count · size]."""
    return ops.reshape(x, ints(0, 0, count, size), special_zero=True)


def _rows(x: ov.Node, size: int) -> ov.Node:
    return ops.reshape(x, ints(-1, size), special_zero=False)


def _row(numbers: NDArray[np.float32]) -> ov.Node:
    return floats(numbers.reshape(1, 1, -1))
