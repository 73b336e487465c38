"""Embeddings that each layer of a decoder has of its own for each token, as Gemma 3n and Gemma 4's smaller models.

    inputs = all_inputs(decoder, own, weights, input_ids, table, projected)    # [batch, tokens, layers, width]
    input_of(3, inputs)                                                        # [batch, tokens, width]

Source: Transformers 5.5, models/gemma4/modeling_gemma4.py, `get_per_layer_inputs` and `project_per_layer_inputs`.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.models.backends.nodes import floats, integer, ints
from outrider_export.direct.decoder import Decoder, LayerEmbedding
from outrider_export.direct.nodes import rms_norm
from outrider_export.direct.weights import LAYER_NORM, Weights


def all_inputs(
    decoder: Decoder,
    own: LayerEmbedding,
    weights: Weights,
    input_ids: ov.Node,
    table: ov.Node,
    projected: ov.Node,
) -> ov.Node:
    """What all layers read of their own, float32 [batch, tokens, layers, width].

    table: float32 [tokens of the vocabulary · layers, width]: those of a token are side by side, so that each has a
    scale of its own in 8 bits. projected: the embedding times the matrix that makes the other half of it, float32
    [batch, tokens, layers · width].
    """
    count, width = len(decoder.layers), own.width
    if own.num_tokens:  # tokens of images and sounds, which are after the others, have those of token 0
        has_own = ops.less(input_ids, ops.constant(np.full((1, 1), own.num_tokens, np.int64)))
        input_ids = ops.select(has_own, input_ids, ops.constant(np.zeros((1, 1), np.int64)))
    first = ops.multiply(ops.unsqueeze(input_ids, ints(2)), ops.constant(np.full((1, 1, 1), count, np.int64)))
    rows = ops.add(first, ops.constant(np.arange(count, dtype=np.int64).reshape(1, 1, count)))
    looked_up = ops.gather(table, ops.convert(rows, "i32"), ops.constant(np.int32(0)))
    scaled = ops.multiply(projected, floats(np.full((1, 1, 1), decoder.hidden_size**-0.5)))
    apart = ops.reshape(scaled, ints(0, 0, count, width), special_zero=True)
    normed = rms_norm(apart, weights.numbers(f"{LAYER_NORM}.weight", width), decoder.eps)
    found = ops.add(normed, ops.multiply(looked_up, floats(np.full((1, 1, 1, 1), width**0.5))))
    return ops.multiply(found, floats(np.full((1, 1, 1, 1), 2**-0.5)))


def input_of(i: int, inputs: ov.Node) -> ov.Node:
    """What layer i reads, float32 [batch, tokens, width]."""
    return ops.gather(inputs, integer(i), integer(2))
