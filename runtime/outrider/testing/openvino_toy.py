"""A toy model as stateful IR, of the shape that optimum-intel writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openvino as ov
from openvino import opset13 as ops

from outrider.models.backends.nodes import END, floats, integer, ints, parameter, result
from outrider.testing.weights import HEAD_SIZE, HEADS, HIDDEN, Matrix, ToyLayer, ToyWeights


def openvino_toy(weights: ToyWeights, mix: Callable[..., Any] | None = None) -> ov.Model:
    """The graph; see `outrider.testing.save_toy_model`.

    mix: makes what layers with a state add, float32 [batch, tokens, hidden], in place of a convolution: of their input,
    their number, the number of sequences int64 [1], beam_idx, and the list of what is assigned to states.
    """
    graph = _Graph()
    embedded = ops.gather(ops.constant(weights.embedding), graph.input_ids, integer(0))
    x = ops.add(embedded, ops.gather(ops.constant(weights.positions), graph.position_ids, integer(0)))
    mask = graph.mask()
    for i, layer in enumerate(weights.layers):
        for convolution in weights.convolutions[i : i + 1]:
            if mix is None:
                mixed = ops.tanh(graph.convolved(x, convolution.filters, f"cache_params.past.conv.{i}"))
            else:
                mixed = mix(x, i, graph.batch, graph.beam_idx, graph.assigned)
            x = _rest_of_layer(ops.add(x, mixed), convolution.up, convolution.down)
        x = _rest_of_layer(ops.add(x, graph.attended(x, layer, i, mask)), layer.up, layer.down)
    logits = result("logits", _product(ops.multiply(x, floats(2)), weights.output))
    inputs = [graph.input_ids, graph.attention_mask, graph.position_ids, graph.beam_idx]
    return ov.Model([logits], graph.assigned, inputs, "toy")


class _Graph:
    """The inputs, and the layers' parts that read them. assigned: what is assigned to states."""

    def __init__(self) -> None:
        self.input_ids, self.attention_mask, self.position_ids = (
            parameter(name, ov.Type.i64, (-1, -1)) for name in ("input_ids", "attention_mask", "position_ids")
        )
        self.beam_idx = parameter("beam_idx", ov.Type.i32, (-1,))
        self.batch = ops.gather(ops.shape_of(self.input_ids), ints(0), integer(0))
        self.count = ops.gather(ops.shape_of(self.input_ids), integer(1), integer(0))
        self.assigned: list[Any] = []

    def mask(self) -> Any:
        """0 where a token sees another, float32 [batch, 1, tokens, length]."""
        length = ops.gather(ops.shape_of(self.attention_mask), integer(1), integer(0))
        columns = ops.range(integer(0), length, integer(1), output_type="i64")
        # The last columns are the tokens' own. With a cache of fixed length, positions do not show that.
        own = ops.range(ops.subtract(length, self.count), length, integer(1), output_type="i64")
        earlier = ops.less_equal(ops.unsqueeze(columns, ints(0, 1, 2)), ops.unsqueeze(own, ints(0, 1, 3)))
        seen = ops.logical_and(earlier, ops.greater(ops.unsqueeze(self.attention_mask, ints(1, 2)), integer(0)))
        return ops.select(seen, floats(0), floats(-65504))

    def attended(self, x: Any, layer: ToyLayer, i: int, mask: Any) -> Any:
        """What attention adds, float32 [batch, tokens, hidden]."""
        query, key, value = (_heads(_product(x, matrix)) for matrix in (layer.query, layer.key, layer.value))
        keys = self._cached(key, f"past_key_values.{i}.keypresent.{i}.key")
        values = self._cached(value, f"past_key_values.{i}.valuepresent.{i}.value")
        read = ops.scaled_dot_product_attention(query, keys, values, mask)
        joined = ops.reshape(ops.transpose(read, ints(0, 2, 1, 3)), ints(0, 0, HIDDEN), True)
        return _product(joined, layer.output)

    def _cached(self, values: Any, name: str) -> Any:
        whole = ops.concat([self._state(name, (HEADS, 0, HEAD_SIZE), (HEADS, -1, HEAD_SIZE)), values], 2)
        self.assigned.append(ov.opset6.assign(whole, name))
        return whole

    def convolved(self, x: Any, filters: Matrix, name: str) -> Any:
        """A causal depthwise convolution, whose state OpenVINO replaces with rows of a table. filters: [hidden, k]."""
        size = filters.shape[1]
        past = self._state(name, (HIDDEN, size), (HIDDEN, size))
        whole = ops.concat([past, ops.transpose(x, ints(0, 2, 1))], -1)
        made = ops.group_convolution(whole, ops.constant(filters.reshape(HIDDEN, 1, 1, size)), [1], [0], [0], [1])
        last = ops.negative(ops.unsqueeze(self.count, ints(0)))
        made = ops.slice(made, last, ints(END), ints(1), ints(2))
        self.assigned.append(ov.opset6.assign(ops.slice(whole, ints(-size), ints(END), ints(1), ints(2)), name))
        return ops.transpose(made, ints(0, 2, 1))

    def _state(self, name: str, first: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        """A state of each sequence. first: its shape before any token."""
        empty = ops.broadcast(floats(0), ops.concat([self.batch, ints(*first)], 0))
        past = ov.opset6.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, *shape]))
        return ops.gather(past, self.beam_idx, integer(0))


def _product(x: Any, matrix: Matrix) -> Any:
    return ops.matmul(x, ops.constant(matrix), False, False)


def _heads(x: Any) -> Any:
    """[batch, tokens, hidden] as [batch, heads, tokens, head_size]."""
    return ops.transpose(ops.reshape(x, ints(0, 0, HEADS, HEAD_SIZE), True), ints(0, 2, 1, 3))


def _rest_of_layer(x: Any, up: Matrix, down: Matrix) -> Any:
    """A network, and a norm."""
    x = ops.add(x, _product(ops.tanh(_product(x, up)), down))
    mean_square = ops.reduce_mean(ops.multiply(x, x), ints(2), True)
    return ops.divide(x, ops.sqrt(mean_square))
