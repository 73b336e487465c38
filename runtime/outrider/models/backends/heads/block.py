"""Drafters that fill in a block of masks at once: DFlash and DSpark.

The main model's hidden states of the context become keys and values of the drafter's layers, without passing through
them. The block, the newest token and masks behind it, reads these and itself, in both directions. So one call gives the
whole draft (Chen et al. 2026, "DFlash: block diffusion for flash speculative decoding").

Inputs of the graph besides those of `PagedAttention`: hidden_states float32 [c, width] of context tokens, input_ids
int64 [b] of blocks, position_ids int64 [c + b], order int64 [c + b], which of all context and then block rows come
first, and in_block int64 [b], the places of block rows in that order. Output: logits [b, 1, vocabulary].

DSpark corrects the logits by the tokens chosen before, on the host (`outrider.drafters.markov`). What that takes of a
row's hidden states is a second output, block_states float32 [b, width], unless it takes none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.models.backends.features import BLOCK_STATES
from outrider.models.backends.heads.layers import (
    BEHIND_ATTENTION,
    PagedAttention,
    Rotation,
    behind_feed_forward,
    heads_of,
    linear,
    norm,
    normed_if,
)
from outrider.models.backends.paged_graph import HIDDEN_IN
from outrider.models.backends.taps import ints, parameter, result

if TYPE_CHECKING:
    from outrider.models.backends.heads.weights import Weights

ORDER, IN_BLOCK = "order", "in_block"
_INT, _FLOAT = ov.Type.i64, ov.Type.f32


def dflash(weights: Weights) -> ov.Model:
    """DFlash, as `DFlashDraftModel`, and DSpark, as `Qwen3DSparkModel` and `Gemma4DSparkModel`.

    Queries and keys have a norm for each head; the layers are those of Qwen3, or Gemma's if the weights say so.
    """
    width = weights.width("fc.weight", 1)
    context, token_ids = parameter(HIDDEN_IN, _FLOAT, (-1, width)), parameter("input_ids", _INT, (-1,))
    positions = parameter("position_ids", _INT, (-1,))
    order, in_block = parameter(ORDER, _INT, (-1,)), parameter(IN_BLOCK, _INT, (-1,))
    attention = PagedAttention(weights, both_ways=True)
    rotation = Rotation.of(ops.unsqueeze(positions, ops.constant([1])), weights)
    projected = ops.unsqueeze(linear(context, weights, "fc"), ops.constant([1]))
    projected = norm(projected, weights, "hidden_norm")
    hidden = weights.embed(token_ids)
    for i in range(int(weights.number("num_layers"))):
        own = f"layers.{i}.self_attn"
        rows = norm(hidden, weights, f"layers.{i}.input_layernorm")
        both = _taken(ops.concat([projected, rows], 0), order)
        keys = rotation(heads_of(both, weights, f"{own}.k", "num_kv_heads"))
        values = heads_of(both, weights, f"{own}.v", "num_kv_heads")
        # The attention works on all rows. Those of the context ask nothing.
        asked = heads_of(rows, weights, f"{own}.q", "num_heads")
        empty = ops.broadcast(
            ops.constant(np.float32(0)),
            ops.concat(
                [
                    _taken(ops.shape_of(context, "i64"), ops.constant([0])),
                    ops.constant([1, int(weights.number("num_heads")), int(weights.number("head_size"))]),
                ],
                0,
            ),
        )
        queries = rotation(_taken(ops.concat([empty, asked], 0), order))
        read = _taken(attention(queries, keys, values), in_block)
        read = linear(read, weights, f"{own}.o_proj")
        hidden = ops.add(hidden, normed_if(read, weights, f"layers.{i}.{BEHIND_ATTENTION}"))
        hidden = behind_feed_forward(hidden, weights, f"layers.{i}")
    hidden = norm(hidden, weights, "norm")
    made = [result("logits", weights.logits(hidden))]
    if f"{BLOCK_STATES}.weight" in weights:
        made.append(result(BLOCK_STATES, ops.squeeze(linear(hidden, weights, BLOCK_STATES), ints(1))))
    return ov.Model(made, [context, token_ids, positions, order, in_block, *attention.parameters])


def _taken(rows: ov.Node, places: ov.Node) -> ov.Node:
    """The rows at these places."""
    return ops.gather(rows, places, ops.constant(0))
