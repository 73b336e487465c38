"""Layers of decoders, as parts of OpenVINO graphs. Rows are float32 [n, 1, width], for n tokens of any sequences.

All but `PagedAttention` work on rows float32 [n, tokens, width] of n sequences, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension

from outrider.models.backends.mixture import GATE, Experts, Router, mixture
from outrider.models.backends.nodes import floats, integer, ints, parameter, silu

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.models.backends.heads.weights import HeadWeights

    # Queries float32 [a, b, heads, head_size], keys and values with fewer heads, to float32 [a, b, heads · head_size].
    Attention = Callable[[ov.Node, ov.Node, ov.Node], ov.Node]

ROW_TYPES = "row_types"
# Of Gemma's layers: a number, and norms before their parts are added to the hidden states.
GELU, AFTER_ATTENTION, AFTER_FEED_FORWARD = "gelu", "behind_attention", "behind_feed_forward"
OUTPUT_GATE = "output_gate"
# Of a mixture of experts: its router, the gate of the expert that all tokens have, and numbers.
ROUTER, SHARED_GATE, NUM_ACTIVE, NORMALISED = "router", "shared_gate", "experts.active", "experts.normalised"
_INT, _FLOAT, _BYTE = ov.Type.i32, ov.Type.f32, ov.Type.u8
# Inputs of PagedAttention from number 10 on, in OpenVINO 2026.4: (type, shape) of those that are not used here.
_FIRST = 10
_OPTIONAL: tuple[tuple[ov.Type, tuple[int, ...]], ...] = (
    (_INT, ()),  # sliding window: so many tokens, itself among them, does one see; 0: all before it
    (_FLOAT, (0,)),  # ALiBi slopes
    (_INT, ()),  # max_context_len
    (_INT, (0,)),  # score aggregation
    (_INT, (0,)),  # rotated blocks, their deltas and their trigonometry
    (_INT, (0,)),
    (_FLOAT, (0,)),
    (_FLOAT, (0,)),  # sparse attention: threshold, block size and stride
    (_INT, ()),
    (_INT, ()),
    (_FLOAT, (0, 0, 0, 0)),  # attention sinks
    (_INT, ()),  # eviction
    (_INT, (0,)),
    (_INT, (0,)),
    (_INT, (0,)),
    (_INT, (0,)),  # token types: new tokens of type 1 that follow each other see each other in both directions
    (_BYTE, (0,)),  # which new tokens see each other
    (_INT, (0,)),
)
_WINDOW, _MAX_CONTEXT_LEN, _ROW_TYPES = 10, 12, 25


def linear(rows: ov.Node, weights: HeadWeights, name: str) -> ov.Node:
    """rows · weightᵀ, plus the bias if there is one."""
    product = ops.matmul(rows, weights[f"{name}.weight"], False, True)
    return ops.add(product, weights[f"{name}.bias"]) if f"{name}.bias" in weights else product


def norm(rows: ov.Node, weights: HeadWeights, name: str) -> ov.Node:
    """RMSNorm over the last axis (Zhang and Sennrich 2019)."""
    mean = ops.reduce_mean(ops.power(rows, floats(2)), ints(-1), True)
    root = ops.sqrt(ops.add(mean, floats(weights.number("rms_norm_eps"))))
    scaled = ops.multiply(rows, ops.divide(floats(1), root))
    return ops.multiply(scaled, weights[f"{name}.weight"])


def _same(rows: ov.Node) -> ov.Node:
    return rows


def after_feed_forward(
    hidden: ov.Node,
    weights: HeadWeights,
    layer: str,
    before: Callable[[ov.Node], ov.Node] = _same,
    after: Callable[[ov.Node], ov.Node] = _same,
) -> ov.Node:
    """The second half of a decoder layer: down(silu(gate) · up) of the normed rows, added to `hidden`.

    As Gemma has it, if the weights say so: with GELU, a norm after it, and a scale of the layer. As Qwen's mixtures
    have it, the same. before, after: what is made of the normed rows, and of the product.
    """
    rows, name = before(norm(hidden, weights, f"{layer}.post_attention_layernorm")), f"{layer}.mlp"
    gate = linear(rows, weights, f"{name}.gate_proj")
    gate = ops.gelu(gate, "tanh") if GELU in weights else ops.swish(gate)
    wide = ops.multiply(gate, linear(rows, weights, f"{name}.up_proj"))
    made = linear(wide, weights, f"{name}.down_proj")
    if f"{layer}.{GATE}.weight" in weights:
        gated = ops.multiply(made, ops.sigmoid(linear(rows, weights, f"{name}.{SHARED_GATE}")))
        made = ops.add(gated, _mixed(rows, weights, layer))
    made = after(made)
    made = normed_if(made, weights, f"{layer}.{AFTER_FEED_FORWARD}")
    hidden = ops.add(hidden, made)
    return ops.multiply(hidden, weights[scale]) if (scale := f"{layer}.layer_scalar") in weights else hidden


def _mixed(rows: ov.Node, weights: HeadWeights, layer: str) -> ov.Node:
    """What the experts that a router chooses make of rows float32 [n, 1, width]."""
    count, size, width = (weights.width(f"{layer}.{GATE}.weight", axis) for axis in range(3))
    is_normalised = bool(weights.number(NORMALISED))
    experts = Experts(width, count, int(weights.number(NUM_ACTIVE)), size, "softmax", normalised=is_normalised)

    def matrix(name: str) -> ov.Node:
        return weights[f"{layer}.{name}.weight"]

    return mixture(experts, rows, Router(weights[f"{layer}.mlp.{ROUTER}.weight"]), matrix, silu)


def normed_if(rows: ov.Node, weights: HeadWeights, name: str) -> ov.Node:
    """The rows, normed if there is such a norm."""
    return norm(rows, weights, name) if f"{name}.weight" in weights else rows


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position embeddings of some positions [a, b]: cosines and sines float32 [a, b, 1, head_size]."""

    cos: ov.Node
    sin: ov.Node

    @classmethod
    def of(cls, positions: ov.Node, weights: HeadWeights, name: str = "rotary") -> Rotation:
        """positions: int64 [a, b]. name: of frequencies and scale among the weights."""
        times = ops.convert(ops.unsqueeze(positions, ints(2)), "f32")
        angles = ops.multiply(times, weights[f"{name}.frequencies"])
        both = ops.unsqueeze(ops.concat([angles, angles], 2), ints(2))
        scale = floats(weights.number(f"{name}.scale"))
        return cls(ops.multiply(ops.cos(both), scale), ops.multiply(ops.sin(both), scale))

    def __call__(self, heads: ov.Node) -> ov.Node:
        """Rotate queries or keys float32 [a, b, heads, head_size]."""
        halves = ops.split(heads, integer(3), 2)
        turned = ops.concat([ops.negative(halves.output(1)), halves.output(0)], 3)
        return ops.add(ops.multiply(heads, self.cos), ops.multiply(turned, self.sin))


class PagedAttention:
    """Attention to a cache in blocks, with the inputs that all layers share.

        attention = PagedAttention(weights)
        attention(queries, keys, values)    # each layer in its turn
        ov.Model(results, [*attention.parameters, …])

    both_ways: whether an input says which new tokens see each other in both directions: row_types, int32 [n], 1 for
    these and 0 for others.
    """

    def __init__(self, weights: HeadWeights, *, both_ways: bool = False) -> None:
        self._weights = weights
        names = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
        self._places = [parameter(name, _INT, (-1,)) for name in names]
        self._longest = parameter("max_context_len", _INT, ())
        self._types = [parameter(ROW_TYPES, _INT, (-1,))] if both_ways else []
        self._caches: list[Any] = []

    @property
    def parameters(self) -> list[Any]:
        """The graph's inputs for the cache."""
        return [*self._places, self._longest, *self._types, *self._caches]

    def __call__(self, queries: ov.Node, keys: ov.Node, values: ov.Node, window: int = 0) -> ov.Node:
        """The next layer's attention, float32 [n, 1, heads · head_size].

        queries: float32 [n, 1, heads, head_size]; keys, values: the same with fewer heads. window: its sliding window
        in tokens; 0 for none.
        """
        layer = len(self._caches) // 2
        shape = (-1, -1, -1, -1)
        own = [parameter(f"{kind}_cache.{layer}", ov.Type.dynamic, shape) for kind in ("key", "value")]
        self._caches += own
        flat = [ops.reshape(each, ints(0, -1), special_zero=True) for each in (queries, keys, values)]
        scale = self._weights.number("head_size") ** -0.5
        inputs = [*flat, *own, *self._places, floats(scale)]
        for number, (kind, sizes) in enumerate(_OPTIONAL, _FIRST):
            if number == _WINDOW:
                inputs.append(ops.constant(np.int32(window)))
            elif number == _MAX_CONTEXT_LEN:
                inputs.append(self._longest)
            elif number == _ROW_TYPES and self._types:
                inputs += self._types
            else:
                inputs.append(ops.constant(np.zeros(sizes, dtype=kind.to_dtype())))
        node = _PagedAttentionExtension([each.output(0) for each in inputs])
        num_heads, size = int(self._weights.number("num_kv_heads")), int(self._weights.number("head_size"))
        for kind in ("k", "v"):
            node.get_rt_info()[f"num_{kind}_heads"] = num_heads
            node.get_rt_info()[f"{kind}_head_size"] = size
        return ops.unsqueeze(node.output(0), ints(1))


def heads_of(rows: ov.Node, weights: HeadWeights, name: str, count: str) -> ov.Node:
    """A projection of rows to heads, float32 [n, 1, heads, head_size], with a norm of each head if there is one."""
    size = int(weights.number("head_size"))
    shape = ints(0, 0, int(weights.number(count)), size)
    heads = ops.reshape(linear(rows, weights, f"{name}_proj"), shape, special_zero=True)
    return normed_if(heads, weights, f"{name}_norm")


def attend(rows: ov.Node, weights: HeadWeights, name: str, attention: Attention, rotation: Rotation) -> ov.Node:
    """Causal self-attention of rows float32 [n, 1, width], with the output projection.

    A gate of the attention's output, as Qwen3-Next has it, is a matrix of its own.
    """
    queries = rotation(heads_of(rows, weights, f"{name}.q", "num_heads"))
    keys = rotation(heads_of(rows, weights, f"{name}.k", "num_kv_heads"))
    values = heads_of(rows, weights, f"{name}.v", "num_kv_heads")
    read = attention(queries, keys, values)
    if f"{name}.{OUTPUT_GATE}.weight" in weights:
        read = ops.multiply(read, ops.sigmoid(linear(rows, weights, f"{name}.{OUTPUT_GATE}")))
    return linear(read, weights, f"{name}.o_proj")


def after_attention(
    hidden: ov.Node, rows: ov.Node, weights: HeadWeights, layer: str, attention: Attention, rotation: Rotation
) -> ov.Node:
    """A decoder layer: attention to `rows`, added to `hidden`, and the feed-forward part."""
    hidden = ops.add(hidden, attend(rows, weights, f"{layer}.self_attn", attention, rotation))
    return after_feed_forward(hidden, weights, layer)
