"""Heads for the tokens after the next one: Medusa's.

Each head reads the main model's last hidden states of the newest token that it has read. Input of the graph:
hidden_states float32 [r, hidden], of r sequences. Output: logits [r · heads, 1, vocabulary], a sequence's heads one
after the other.
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
    hidden: ov.op.Parameter = parameter(HIDDEN_IN, ov.Type.f32, (-1, int(weights.number("hidden_size"))))
    logits = []
    for i in range(int(weights.number("num_places"))):
        rows = _residual_blocks(hidden, weights, f"{i}")
        logits.append(weights.logits(rows, f"{i}.lm_head"))
    return ov.Model([result("logits", _one_after_another(logits))], [hidden])


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
