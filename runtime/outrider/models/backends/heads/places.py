"""Heads for the tokens after the next one: Medusa, blockwise parallel decoding, and Hydra.

Each head reads the main model's last hidden states of the newest token that it has read. Inputs of the graphs:
hidden_states float32 [r, hidden], of r sequences, and for Hydra input_ids int64 [r, place + 1]. Output: logits
[r · heads, 1, vocabulary], a sequence's heads one after the other; for Hydra [r, 1, vocabulary], of one head.
"""

from __future__ import annotations

import openvino as ov
from openvino import opset13 as ops

from outrider.models.backends.heads.layers import linear
from outrider.models.backends.heads.weights import HeadWeights
from outrider.models.backends.nodes import ints, parameter, result
from outrider.models.backends.paged_graph import HIDDEN_IN


def medusa(weights: HeadWeights) -> ov.Model:
    """Medusa (Cai et al. 2024, "Medusa: simple LLM inference acceleration framework with multiple decoding heads")."""
    hidden = _hidden(weights)
    logits = []
    for i in range(int(weights.number("num_places"))):
        rows = _residual_blocks(hidden, weights, f"{i}")
        logits.append(weights.logits(rows, f"{i}.lm_head"))
    return ov.Model([result("logits", _one_after_another(logits))], [hidden])


def blockwise(weights: HeadWeights) -> ov.Model:
    """Blockwise parallel decoding (Stern et al. 2018, "Blockwise parallel decoding for deep autoregressive models",
    section 6): a layer for each place, and the main model's output matrix.
    """
    hidden = _hidden(weights)
    rows = []
    for i in range(int(weights.number("num_places"))):
        wide = ops.relu(linear(hidden, weights, f"{i}.up"))
        rows.append(ops.add(hidden, linear(wide, weights, f"{i}.down")))
    made = result("logits", weights.logits(_one_after_another(rows)))
    return ov.Model([made], [hidden])


def hydra(weights: HeadWeights, place: int = 0) -> ov.Model:
    """The head of one place, which also reads the tokens before it (Ankner et al. 2024, "Hydra: sequentially-dependent
    draft heads for Medusa decoding").
    """
    hidden, token_ids = _hidden(weights), parameter("input_ids", ov.Type.i64, (-1, place + 1))
    flat = ops.reshape(token_ids, ints(-1), special_zero=False)
    size = int(weights.number("hidden_size"))
    embedded = ops.reshape(weights.embed(flat), ints(-1, (place + 1) * size), special_zero=False)
    first = ops.swish(linear(ops.concat([hidden, embedded], 1), weights, f"{place}.in"))
    rows = _residual_blocks(ops.add(hidden, first), weights, f"{place}")
    logits = ops.unsqueeze(weights.logits(rows, f"{place}.lm_head"), ints(1))
    return ov.Model([result("logits", logits)], [hidden, token_ids])


def _hidden(weights: HeadWeights) -> ov.op.Parameter:
    made: ov.op.Parameter = parameter(HIDDEN_IN, ov.Type.f32, (-1, int(weights.number("hidden_size"))))
    return made


def _residual_blocks(rows: ov.Node, weights: HeadWeights, name: str) -> ov.Node:
    """rows + silu(linear(rows)), as often as there are layers."""
    for i in range(int(weights.number("num_layers"))):
        rows = ops.add(rows, ops.swish(linear(rows, weights, f"{name}.{i}.linear")))
    return rows


def _one_after_another(values: list[ov.Node]) -> ov.Node:
    """Values [r, width] of each head, as [r · heads, 1, width]."""
    together = ops.concat([ops.unsqueeze(each, ints(1)) for each in values], 1)
    width = values[0].get_output_partial_shape(0)[1].get_length()
    return ops.reshape(together, ints(-1, 1, width), special_zero=False)
