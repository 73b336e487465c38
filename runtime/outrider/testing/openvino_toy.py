"""A toy model as stateful IR, of the shape that optimum-intel writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.models.backends.taps import ints, parameter, result
from outrider.testing.weights import HEAD_SIZE, HEADS, HIDDEN, ToyWeights


def openvino_toy(weights: ToyWeights) -> ov.Model:
    """The graph; see `outrider.testing.save_toy_model`."""

    def scalar(value: int) -> Any:
        return ops.constant(np.int64(value))

    def product(x: Any, matrix: NDArray[np.float32]) -> Any:
        return ops.matmul(x, ops.constant(matrix), False, False)

    axis0, heads_first = scalar(0), ints(0, 2, 1, 3)
    input_ids, attention_mask, position_ids = (
        parameter(name, ov.Type.i64, (-1, -1)) for name in ("input_ids", "attention_mask", "position_ids")
    )
    beam_idx = parameter("beam_idx", ov.Type.i32, (-1,))

    embedded = ops.gather(ops.constant(weights.embedding), input_ids, axis0)
    x = ops.add(embedded, ops.gather(ops.constant(weights.positions), position_ids, axis0))
    batch = ops.gather(ops.shape_of(input_ids), ints(0), axis0)
    empty_shape = ops.concat([batch, ints(HEADS, 0, HEAD_SIZE)], 0)
    empty = ops.broadcast(ops.constant(np.float32(0)), empty_shape)
    length = ops.gather(ops.shape_of(attention_mask), scalar(1), axis0)
    count = ops.gather(ops.shape_of(input_ids), scalar(1), axis0)
    columns = ops.range(scalar(0), length, scalar(1), output_type="i64")
    # The last columns are the tokens' own. With a cache of fixed length, positions do not show that.
    own = ops.range(ops.subtract(length, count), length, scalar(1), output_type="i64")
    earlier = ops.less_equal(ops.unsqueeze(columns, ints(0, 1, 2)), ops.unsqueeze(own, ints(0, 1, 3)))
    seen = ops.logical_and(earlier, ops.greater(ops.unsqueeze(attention_mask, ints(1, 2)), scalar(0)))
    mask = ops.select(seen, ops.constant(np.float32(0)), ops.constant(np.float32(-65504)))
    assigned = []

    def heads(x: Any, matrix: NDArray[np.float32]) -> Any:
        split = ops.reshape(product(x, matrix), ints(0, 0, HEADS, HEAD_SIZE), True)
        return ops.transpose(split, heads_first)

    def cached(values: Any, name: str) -> Any:
        past = ov.opset6.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, HEADS, -1, HEAD_SIZE]))
        whole = ops.concat([ops.gather(past, beam_idx, axis0), values], 2)
        assigned.append(ov.opset6.assign(whole, name))
        return whole

    for i, layer in enumerate(weights.layers):
        key = cached(heads(x, layer.key), f"past_key_values.{i}.keypresent.{i}.key")
        value = cached(heads(x, layer.value), f"past_key_values.{i}.valuepresent.{i}.value")
        attended = ops.scaled_dot_product_attention(heads(x, layer.query), key, value, mask)
        joined = ops.reshape(ops.transpose(attended, heads_first), ints(0, 0, HIDDEN), True)
        x = ops.add(x, product(joined, layer.output))
        x = ops.add(x, product(ops.tanh(product(x, layer.up)), layer.down))
        mean_square = ops.reduce_mean(ops.multiply(x, x), ints(2), True)
        x = ops.divide(x, ops.sqrt(mean_square))
    doubled = ops.multiply(x, ops.constant(np.float32(2)))
    logits = result("logits", product(doubled, weights.output))
    return ov.Model([logits], assigned, [input_ids, attention_mask, position_ids, beam_idx], "toy")
