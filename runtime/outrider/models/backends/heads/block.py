"""Drafters that fill in a block of masks at once: DFlash, DFlash 2 and DSpark.

The main model's hidden states of the context become keys and values of the drafter's layers, without passing through
them. The block, the newest token and masks after it, reads these and itself, in both directions. So one call gives the
whole draft (Chen et al. 2026, "DFlash: block diffusion for flash speculative decoding").

Inputs of the graph besides those of `PagedAttention`: hidden_states float32 [c, width] of context tokens, input_ids
int64 [b] of blocks, position_ids int64 [c + b], order int64 [c + b], which of all context and then block rows come
first, and in_block int64 [b], the places of block rows in that order. Output: logits [b, 1, vocabulary].

DSpark corrects the logits by the tokens chosen before, on the host (`outrider.drafters.markov`). What that takes of a
row's hidden states is a second output, block_states float32 [b, width], unless it takes none. So does DFlash 2, whose
layers also have a causal convolution within the block, before and after each part.
"""

from __future__ import annotations

import openvino as ov
from openvino import opset13 as ops

from outrider.models.backends.features import BLOCK_STATES
from outrider.models.backends.heads.layers import (
    AFTER_ATTENTION,
    PagedAttention,
    Rotation,
    after_feed_forward,
    heads_of,
    linear,
    norm,
    normed_if,
)
from outrider.models.backends.heads.weights import HeadWeights
from outrider.models.backends.nodes import floats, integer, ints, parameter, result
from outrider.models.backends.paged_graph import HIDDEN_IN

ORDER, IN_BLOCK = "order", "in_block"
INPUT_SCALE, WINDOW = "input_scale", "window"
_INT, _FLOAT = ov.Type.i64, ov.Type.f32


def dflash(weights: HeadWeights) -> ov.Model:
    """DFlash, as `DFlashDraftModel` and `DFlash2DraftModel`, and DSpark, as `Qwen3DSparkModel` and others.

    Queries and keys have a norm for each head; the layers are those of Qwen3, or Gemma's if the weights say so.
    """
    width = weights.width("fc.weight", 1)
    context, token_ids = parameter(HIDDEN_IN, _FLOAT, (-1, width)), parameter("input_ids", _INT, (-1,))
    positions = parameter("position_ids", _INT, (-1,))
    order, in_block = parameter(ORDER, _INT, (-1,)), parameter(IN_BLOCK, _INT, (-1,))
    attention = PagedAttention(weights, both_ways=True)
    rotation = Rotation.of(ops.unsqueeze(positions, ints(1)), weights)
    projected = ops.unsqueeze(linear(context, weights, "fc"), ints(1))
    projected = norm(projected, weights, "hidden_norm")
    hidden = weights.embed(token_ids)
    if INPUT_SCALE in weights:
        hidden = ops.multiply(hidden, weights[INPUT_SCALE])
    for i in range(int(weights.number("num_layers"))):
        own, window = f"layers.{i}.self_attn", f"layers.{i}.{WINDOW}"
        around = _Around(weights, in_block, f"layers.{i}.attention_conv")
        rows = around.before(norm(hidden, weights, f"layers.{i}.input_layernorm"))
        both = _taken(ops.concat([projected, rows], 0), order)
        keys = rotation(heads_of(both, weights, f"{own}.k", "num_kv_heads"))
        values = heads_of(both, weights, f"{own}.v", "num_kv_heads")
        # The attention works on all rows. Those of the context ask nothing.
        asked = heads_of(rows, weights, f"{own}.q", "num_heads")
        empty = ops.broadcast(
            floats(0),
            ops.concat(
                [
                    _taken(ops.shape_of(context, "i64"), ints(0)),
                    ints(1, int(weights.number("num_heads")), int(weights.number("head_size"))),
                ],
                0,
            ),
        )
        queries = rotation(_taken(ops.concat([empty, asked], 0), order))
        sees = int(weights.number(window)) if window in weights else 0
        read = _taken(attention(queries, keys, values, sees), in_block)
        read = around.after(linear(read, weights, f"{own}.o_proj"))
        hidden = ops.add(hidden, normed_if(read, weights, f"layers.{i}.{AFTER_ATTENTION}"))
        around = _Around(weights, in_block, f"layers.{i}.mlp_conv")
        hidden = after_feed_forward(hidden, weights, f"layers.{i}", around.before, around.after)
    hidden = norm(hidden, weights, "norm")
    made = [result("logits", weights.logits(hidden))]
    if f"{BLOCK_STATES}.weight" in weights:
        made.append(result(BLOCK_STATES, ops.squeeze(linear(hidden, weights, BLOCK_STATES), ints(1))))
    return ov.Model(made, [context, token_ids, positions, order, in_block, *attention.parameters])


class _Around:
    """The convolution before and after a part of a layer, if the weights have one; see `_convolved`.

    One projection of what the first reads makes the kernels of both.
    """

    def __init__(self, weights: HeadWeights, in_block: ov.Node, name: str) -> None:
        self._weights, self._in_block, self._name = weights, in_block, name
        self._has_one = f"{name}.base_kernel" in weights
        self._own: ov.Node | None = None  # float32 [b, sides, taps, groups], what a row adds to the kernels

    def before(self, rows: ov.Node) -> ov.Node:
        """What the part reads of rows float32 [b, 1, hidden]."""
        if not self._has_one:
            return rows
        sides, taps = (self._weights.width(f"{self._name}.base_kernel", axis) for axis in (0, 1))
        made = linear(rows, self._weights, f"{self._name}.kernel_projection")
        groups = self._weights.width(f"{self._name}.kernel_projection.weight", 0) // (sides * taps)
        self._own = ops.reshape(made, ints(-1, sides, taps, groups), special_zero=False)
        return self._convolved(rows, 0)

    def after(self, rows: ov.Node) -> ov.Node:
        """What is made of the part's rows float32 [b, 1, hidden]."""
        return self._convolved(rows, 1) if self._has_one else rows

    def _convolved(self, rows: ov.Node, side: int) -> ov.Node:
        """Σ (base kernel + row's own kernel of its group) · row so many places before, within the block.

        Rows [b, 1, hidden] of several blocks are one after the other: a row so many places before is of the same block
        if there are as many places between them among all rows.
        """
        base = self._weights[f"{self._name}.base_kernel"]
        _, taps, hidden = (self._weights.width(f"{self._name}.base_kernel", axis) for axis in range(3))
        if self._own is None:
            raise AssertionError("`before` makes it")
        groups = self._own.get_output_partial_shape(0)[3].get_length()
        shape = ints(-1, groups, hidden // groups)
        total: ov.Node | None = None
        for tap in range(taps):
            own = ops.gather(ops.gather(self._own, ints(side), ints(1)), ints(tap), ints(2))  # [b, 1, 1, groups]
            own = ops.reshape(own, ints(-1, groups, 1), special_zero=False)
            fixed = ops.reshape(ops.gather(ops.gather(base, ints(side), ints(0)), ints(tap), ints(1)), shape, False)
            part = ops.multiply(ops.add(fixed, own), ops.reshape(self._before(rows, tap), shape, special_zero=False))
            total = part if total is None else ops.add(total, part)
        return ops.reshape(total, ints(-1, 1, hidden), special_zero=False)

    def _before(self, rows: ov.Node, count: int) -> ov.Node:
        """The rows so many places before, or zeros where that is no row of the same block."""
        if not count:
            return rows
        num_rows = _taken(ops.shape_of(self._in_block, "i64"), integer(0))
        numbers = ops.range(integer(0), num_rows, integer(1), "i64")
        earlier = ops.maximum(ops.subtract(numbers, ints(count)), ints(0))
        is_same = ops.equal(ops.subtract(self._in_block, _taken(self._in_block, earlier)), ints(count))
        kept = ops.reshape(ops.convert(is_same, "f32"), ints(-1, 1, 1), special_zero=False)
        return ops.multiply(_taken(rows, earlier), kept)


def _taken(rows: ov.Node, places: ov.Node) -> ov.Node:
    """The rows at these places."""
    return ops.gather(rows, places, integer(0))
