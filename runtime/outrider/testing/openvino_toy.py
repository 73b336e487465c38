"""A toy model as stateful IR, of the shape that optimum-intel writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.models.backends.nodes import END, floats, integer, ints, parameter, result
from outrider.testing.weights import HEAD_SIZE, HEADS, HIDDEN, ToyWeights


def openvino_toy(weights: ToyWeights, mix: Callable[..., Any] | None = None) -> ov.Model:
    """The graph; see `outrider.testing.save_toy_model`.

    mix: makes what layers with a state add, float32 [batch, tokens, hidden], in place of a convolution: of their input,
    their number, the number of sequences int64 [1], beam_idx, and the list of what is assigned to states.
    """

    def product(x: Any, matrix: NDArray[np.float32]) -> Any:
        return ops.matmul(x, ops.constant(matrix), False, False)

    axis0, heads_first = integer(0), ints(0, 2, 1, 3)
    input_ids, attention_mask, position_ids = (
        parameter(name, ov.Type.i64, (-1, -1)) for name in ("input_ids", "attention_mask", "position_ids")
    )
    beam_idx = parameter("beam_idx", ov.Type.i32, (-1,))

    embedded = ops.gather(ops.constant(weights.embedding), input_ids, axis0)
    x = ops.add(embedded, ops.gather(ops.constant(weights.positions), position_ids, axis0))
    batch = ops.gather(ops.shape_of(input_ids), ints(0), axis0)
    empty_shape = ops.concat([batch, ints(HEADS, 0, HEAD_SIZE)], 0)
    empty = ops.broadcast(floats(0), empty_shape)
    length = ops.gather(ops.shape_of(attention_mask), integer(1), axis0)
    count = ops.gather(ops.shape_of(input_ids), integer(1), axis0)
    columns = ops.range(integer(0), length, integer(1), output_type="i64")
    # The last columns are the tokens' own. With a cache of fixed length, positions do not show that.
    own = ops.range(ops.subtract(length, count), length, integer(1), output_type="i64")
    earlier = ops.less_equal(ops.unsqueeze(columns, ints(0, 1, 2)), ops.unsqueeze(own, ints(0, 1, 3)))
    seen = ops.logical_and(earlier, ops.greater(ops.unsqueeze(attention_mask, ints(1, 2)), integer(0)))
    mask = ops.select(seen, floats(0), floats(-65504))
    assigned = []

    def heads(x: Any, matrix: NDArray[np.float32]) -> Any:
        split = ops.reshape(product(x, matrix), ints(0, 0, HEADS, HEAD_SIZE), True)
        return ops.transpose(split, heads_first)

    def cached(values: Any, name: str) -> Any:
        past = ov.opset6.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, HEADS, -1, HEAD_SIZE]))
        whole = ops.concat([ops.gather(past, beam_idx, axis0), values], 2)
        assigned.append(ov.opset6.assign(whole, name))
        return whole

    def convolved(x: Any, filters: NDArray[np.float32], name: str) -> Any:
        """A causal depthwise convolution, whose state OpenVINO replaces with rows of a table. filters: [hidden, k]."""
        size = filters.shape[1]
        none = ops.broadcast(floats(0), ops.concat([batch, ints(HIDDEN, size)], 0))
        past = ov.opset6.read_value(none, name, ov.Type.f32, ov.PartialShape([-1, HIDDEN, size]))
        columns = ops.transpose(x, ints(0, 2, 1))
        whole = ops.concat([ops.gather(past, beam_idx, axis0), columns], -1)
        made = ops.group_convolution(whole, ops.constant(filters.reshape(HIDDEN, 1, 1, size)), [1], [0], [0], [1])
        last = ops.negative(ops.unsqueeze(count, ints(0)))
        made = ops.slice(made, last, ints(END), ints(1), ints(2))
        assigned.append(ov.opset6.assign(ops.slice(whole, ints(-size), ints(END), ints(1), ints(2)), name))
        return ops.transpose(made, ints(0, 2, 1))

    def rest_of_layer(x: Any, up: NDArray[np.float32], down: NDArray[np.float32]) -> Any:
        x = ops.add(x, product(ops.tanh(product(x, up)), down))
        mean_square = ops.reduce_mean(ops.multiply(x, x), ints(2), True)
        return ops.divide(x, ops.sqrt(mean_square))

    for i, layer in enumerate(weights.layers):
        for convolution in weights.convolutions[i : i + 1]:
            if mix is None:
                mixed = ops.tanh(convolved(x, convolution.filters, f"cache_params.past.conv.{i}"))
            else:
                mixed = mix(x, i, batch, beam_idx, assigned)
            x = ops.add(x, mixed)
            x = rest_of_layer(x, convolution.up, convolution.down)
        key = cached(heads(x, layer.key), f"past_key_values.{i}.keypresent.{i}.key")
        value = cached(heads(x, layer.value), f"past_key_values.{i}.valuepresent.{i}.value")
        attended = ops.scaled_dot_product_attention(heads(x, layer.query), key, value, mask)
        joined = ops.reshape(ops.transpose(attended, heads_first), ints(0, 0, HIDDEN), True)
        x = rest_of_layer(ops.add(x, product(joined, layer.output)), layer.up, layer.down)
    doubled = ops.multiply(x, floats(2))
    logits = result("logits", product(doubled, weights.output))
    return ov.Model([logits], assigned, [input_ids, attention_mask, position_ids, beam_idx], "toy")
