"""Drafters that read hidden states and make the next ones: EAGLE-3 and MTP modules.

Such a drafter is one decoder layer. Its token t is the main model's token t + 1, together with the hidden states that
the main model had at t. Its logits are for token t + 2, and its own output takes the place of the main model's hidden
states for the draft tokens that follow.

Inputs of the graph besides those of `PagedAttention`: input_ids int64 [n], position_ids int64 [n], hidden_states
float32 [n, width]. Outputs: logits [n, 1, vocabulary], next_hidden float32 [n, hidden].
"""

from __future__ import annotations

import openvino as ov
from openvino import opset13 as ops

from outrider.models.backends.features import NEXT_HIDDEN
from outrider.models.backends.heads.layers import PagedAttention, Rotation, after_attention, linear, norm
from outrider.models.backends.heads.weights import HeadWeights
from outrider.models.backends.nodes import integer, ints, parameter, result
from outrider.models.backends.paged_graph import HIDDEN_IN

NORM_FIRST = "norm_before_residual"  # among the weights of EAGLE-3 drafters whose residual is the normed hidden states


def eagle3(weights: HeadWeights) -> ov.Model:
    """EAGLE-3 (Li et al. 2025, "EAGLE-3: scaling up inference acceleration of large language models via training-time
    test"), as `LlamaForCausalLMEagle3` in SpecForge, or as vLLM's speculators with `norm_before_residual`.

    hidden_states: the main model's of several layers, or zeros; after them the drafter's own, or zeros. `fc` has no
    bias, so that its product with zeros adds nothing.
    """
    graph = _Inputs(weights)
    width = weights.width("fc.weight", 1)
    parts = ops.variadic_split(graph.hidden_states, integer(2), ints(width, -1))
    hidden = ops.add(linear(parts.output(0), weights, "fc"), parts.output(1))
    layer = "midlayer"
    normed = norm(hidden, weights, f"{layer}.hidden_norm")
    both = ops.concat([norm(graph.embeddings, weights, f"{layer}.input_layernorm"), normed], 2)
    residual = normed if NORM_FIRST in weights else hidden
    out = after_attention(residual, both, weights, layer, graph.attention, graph.rotation)
    return graph.model(weights.logits(norm(out, weights, "norm")), out)


def mtp(weights: HeadWeights) -> ov.Model:
    """A multi-token prediction module (DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 2.2), used again and
    again, in the layout of Qwen3-Next.

    hidden_states: the main model's last ones, after the final norm, or the drafter's own.
    """
    graph = _Inputs(weights)
    both = [
        norm(graph.embeddings, weights, "pre_fc_norm_embedding"),
        norm(graph.hidden_states, weights, "pre_fc_norm_hidden"),
    ]
    hidden = linear(ops.concat(both, 2), weights, "fc")
    layer = "layers.0"
    rows = norm(hidden, weights, f"{layer}.input_layernorm")
    out = norm(after_attention(hidden, rows, weights, layer, graph.attention, graph.rotation), weights, "norm")
    return graph.model(weights.logits(out), out)


class _Inputs:
    """The inputs that both have."""

    def __init__(self, weights: HeadWeights) -> None:
        self._token_ids = parameter("input_ids", ov.Type.i64, (-1,))
        self._positions = parameter("position_ids", ov.Type.i64, (-1,))
        self._hidden = parameter(HIDDEN_IN, ov.Type.f32, (-1, int(weights.number("hidden_width"))))
        self.attention = PagedAttention(weights)
        self.embeddings = weights.embed(self._token_ids)
        self.hidden_states = ops.unsqueeze(self._hidden, ints(1))
        self.rotation = Rotation.of(ops.unsqueeze(self._positions, ints(1)), weights)

    def model(self, logits: ov.Node, hidden: ov.Node) -> ov.Model:
        """The whole graph."""
        made = [result("logits", logits), result(NEXT_HIDDEN, ops.squeeze(hidden, ints(1)))]
        return ov.Model(made, [self._token_ids, self._positions, self._hidden, *self.attention.parameters])
