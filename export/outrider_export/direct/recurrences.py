"""Layers that keep a state of fixed size instead of keys and values: causal convolution, gated delta net, Mamba-2.

    states = States(batch, beam_idx)
    mixed = causal_convolution(states, "conv.0", x, weight, bias)               # x [batch, tokens, channels]
    found = gated_delta_net(states, "recurrent.0", q, k, v, gate, beta)         # [batch, tokens, heads, size]
    found = selective_ssm(states, "recurrent.0", a, dt, b, x, c)
    model = ov.Model(results, states.sinks, parameters)

Recurrences are Loops over tokens, in the form that OpenVINO's paged_attention_transformation replaces by
PagedCausalConv1D, PagedGatedDeltaNet and PagedSelectiveSSM. After it, tokens are in the batch's place, so everything
here works for any batch.

Source: the forms as optimum-intel 2.2's exporter makes them; Yang et al. 2024, "Gated Delta Networks"; Dao and Gu 2024,
"Transformers are SSMs" (Mamba-2).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import util

from outrider.models.backends.nodes import END, floats, integer, ints, size_of, transposed

_L2_EPS = 1e-6  # of the norms of queries and keys
_TRUE = True


@dataclass
class States:
    """The variables of a graph. batch: int64 [1], its number of sequences. beam_idx: int32 [batch]."""

    batch: ov.Node
    beam_idx: ov.Node
    sinks: list[ov.Node] = field(default_factory=list)

    def read(self, name: str, *sizes: int) -> tuple[ov.Node, util.Variable]:
        """A state float32 [batch, *sizes], zeros at first, and its variable."""
        info = util.VariableInfo()
        info.data_shape, info.data_type = ov.PartialShape([-1, *sizes]), ov.Type.f32
        info.variable_id = f"cache_params.past.{name}cache_params.present.{name}"
        variable = util.Variable(info)
        empty = ops.broadcast(floats(0), ops.concat([self.batch, ints(*sizes)], 0))
        return ops.gather(ov.op.read_value(empty, variable), self.beam_idx, integer(0)), variable

    def write(self, variable: util.Variable, value: ov.Node) -> None:
        """Have a variable hold a value after the call."""
        self.sinks.append(ov.op.assign(value, variable))


def causal_convolution(
    states: States, name: str, x: ov.Node, weight: np.ndarray, bias: np.ndarray | None = None
) -> ov.Node:
    """Each channel's weighted sum of its last k tokens, float32 [batch, tokens, channels] as x.

    weight: float32 [channels, k], that of the newest token last. bias: float32 [channels]. The state holds k tokens.
    """
    channels, width = weight.shape
    state, variable = states.read(name, channels, width)
    x = transposed(x, 0, 2, 1)
    joined = ops.concat([state, x], -1)
    kernel = floats(weight.reshape(channels, 1, 1, width))
    found = ops.group_convolution(joined, kernel, [1], [0], [0], [1])
    tokens = ops.unsqueeze(size_of(x, 2), integer(0))
    found = ops.slice(found, ops.multiply(tokens, ints(-1)), ints(END), ints(1), ints(2))
    states.write(variable, ops.slice(joined, ints(-width), ints(END), ints(1), ints(2)))
    if bias is not None:
        found = ops.add(found, floats(bias.reshape(1, channels, 1)))
    return transposed(found, 0, 2, 1)


def gated_delta_net(
    states: States, name: str, q: ov.Node, k: ov.Node, v: ov.Node, gate: ov.Node, beta: ov.Node
) -> ov.Node:
    """Gated delta rule over tokens, float32 [batch, tokens, heads, size] as v.

    q, k: float32 [batch, tokens, heads or a divisor of it, key size], whose lengths are made 1. gate: logarithms of
    decays, beta: how much of a value is written, both float32 [batch, tokens, heads]. State [batch, heads, key size,
    size].
    """
    heads, size = (v.get_output_partial_shape(0)[axis].get_length() for axis in (2, 3))
    groups, key_size = (k.get_output_partial_shape(0)[axis].get_length() for axis in (2, 3))
    if heads != groups:
        q, k = (ops.gather(each, ints(*np.repeat(np.arange(groups), heads // groups)), integer(2)) for each in (q, k))
    q, k = _unit_length(q), _unit_length(k)
    q, k, v = (transposed(each, 0, 2, 1, 3) for each in (q, k, v))
    gate, beta = (transposed(each, 0, 2, 1) for each in (gate, beta))
    width = ops.convert(size_of(q, 3), "f32")  # a constant instead is not recognised
    q = ops.divide(q, ops.power(width, floats(0.5)))
    state, variable = states.read(name, heads, key_size, size)

    step = ops.parameter([], ov.Type.i32)
    q_t, k_t, v_t = (ops.parameter([-1, -1, 1, -1], ov.Type.f32) for _ in range(3))
    gate_t, beta_t = (ops.parameter([-1, -1, 1], ov.Type.f32) for _ in range(2))
    state_t, found_t = (ops.parameter([-1, -1, -1, -1], ov.Type.f32) for _ in range(2))
    query, key, value = (ops.squeeze(each, _int32(2)) for each in (q_t, k_t, v_t))
    column = ops.unsqueeze(key, _int32(-1))
    decayed = ops.multiply(state_t, ops.unsqueeze(ops.exp(gate_t), _int32(-1)))
    known = ops.reduce_sum(ops.multiply(decayed, column), _int32(-2), False)
    delta = ops.multiply(ops.subtract(value, known), beta_t)
    updated = ops.add(decayed, ops.multiply(ops.unsqueeze(key, _int32(-1)), ops.unsqueeze(delta, _int32(-2))))
    answer = ops.reduce_sum(ops.multiply(updated, ops.unsqueeze(query, _int32(-1))), _int32(-2), True)
    written = ops.scatter_update(found_t, ops.unsqueeze(step, _int32(0)), answer, _int32(2))
    body = ov.Model(
        [ops.constant([_TRUE], dtype=bool), updated, written],
        [step, q_t, k_t, v_t, gate_t, beta_t, state_t, found_t],
        "gated_delta_net",
    )
    loop = ops.loop(ops.convert(size_of(v, 2), "i32"), ops.constant(_TRUE, dtype=bool))
    loop.set_function(body)
    for inner, outer in ((q_t, q), (k_t, k), (v_t, v), (gate_t, gate), (beta_t, beta)):
        loop.set_sliced_input(inner, outer.output(0), 0, 1, 1, -1, 2)
    empty = ops.broadcast(floats(0), ops.shape_of(v, "i64"))
    found, last = _close(loop, state_t, state, updated, found_t, empty, written)
    states.write(variable, ops.reshape(last, ints(-1, heads, key_size, size), special_zero=False))
    return transposed(found, 0, 2, 1, 3)


def selective_ssm(states: States, name: str, a: np.ndarray, dt: ov.Node, b: ov.Node, x: ov.Node, c: ov.Node) -> ov.Node:
    """Mamba-2's selective state space over tokens, float32 [batch, tokens, heads, size] as x, without its skip D.

    a: float32 [heads], below 0. dt: float32 [batch, tokens, heads]. b, c: float32 [batch, tokens, groups, state size].
    State [batch, heads, size, state size].
    """
    heads, size = (x.get_output_partial_shape(0)[axis].get_length() for axis in (2, 3))
    groups, wide = (b.get_output_partial_shape(0)[axis].get_length() for axis in (2, 3))
    b, c = (_per_head(each, heads, groups, wide) for each in (b, c))
    decay = ops.exp(ops.multiply(floats(a), dt))
    decay = ops.reshape(decay, ints(0, 0, 0, 1, 1), special_zero=True)
    added = ops.multiply(ops.unsqueeze(dt, _int32(-1)), b)
    added = ops.multiply(ops.unsqueeze(added, _int32(-2)), ops.unsqueeze(x, _int32(-1)))
    c = ops.unsqueeze(c, _int32(-2))
    state, variable = states.read(name, heads, size, wide)

    step = ops.parameter([], ov.Type.i32)
    decay_t = ops.parameter([-1, 1, -1, 1, 1], ov.Type.f32)
    added_t = ops.parameter([-1, 1, -1, -1, -1], ov.Type.f32)
    c_t = ops.parameter([-1, 1, -1, 1, -1], ov.Type.f32)
    state_t, found_t = (ops.parameter([-1, -1, -1, -1], ov.Type.f32) for _ in range(2))
    decay_now, added_now, c_now = (ops.squeeze(each, _int32(1)) for each in (decay_t, added_t, c_t))
    updated = ops.add(ops.multiply(state_t, decay_now), added_now)
    answer = ops.unsqueeze(ops.reduce_sum(ops.multiply(updated, c_now), _int32(-1), False), _int32(1))
    written = ops.scatter_update(found_t, ops.unsqueeze(step, _int32(0)), answer, _int32(1))
    body = ov.Model(
        [ops.constant([_TRUE], dtype=bool), updated, written],
        [step, decay_t, added_t, c_t, state_t, found_t],
        "selective_ssm",
    )
    loop = ops.loop(ops.convert(size_of(x, 1), "i32"), ops.constant(_TRUE, dtype=bool))
    loop.set_function(body)
    for inner, outer in ((decay_t, decay), (added_t, added), (c_t, c)):
        loop.set_sliced_input(inner, outer.output(0), 0, 1, 1, -1, 1)
    empty = ops.broadcast(floats(0), ops.shape_of(x, "i64"))
    found, last = _close(loop, state_t, state, updated, found_t, empty, written)
    states.write(variable, ops.reshape(last, ints(-1, heads, size, wide), special_zero=False))
    return found


def _close(
    loop: ov.Node, state_t: ov.Node, state: ov.Node, updated: ov.Node,
    found_t: ov.Node, empty: ov.Node, written: ov.Node,
) -> tuple[ov.Node, ov.Node]:  # fmt: skip
    """A Loop's found values and last state, with these carried from token to token."""
    loop.set_merged_input(state_t, state.output(0), updated.output(0))
    loop.set_merged_input(found_t, empty.output(0), written.output(0))
    loop.set_special_body_ports([0, 0])
    return loop.get_iter_value(written.output(0), -1), loop.get_iter_value(updated.output(0), -1)


def _unit_length(x: ov.Node) -> ov.Node:
    squares = ops.reduce_sum(ops.multiply(x, x), ints(-1), True)
    return ops.multiply(x, ops.divide(floats(1), ops.sqrt(ops.add(squares, floats(_L2_EPS)))))


def _per_head(x: ov.Node, heads: int, groups: int, width: int) -> ov.Node:
    """[batch, tokens, heads, width] of [batch, tokens, groups, width]: each group for its heads, one after another."""
    copies = ops.tile(ops.unsqueeze(x, _int32(3)), ints(1, 1, 1, heads // groups, 1))
    return ops.reshape(copies, ints(0, 0, -1, width), special_zero=True)


def _int32(number: int) -> ov.Node:
    return ops.constant(np.int32(number))
