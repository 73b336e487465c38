"""A toy model in ONNX, of the shape that `outrider.bundle` describes. Needs the package `onnx`."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from outrider.testing.weights import HEAD_SIZE, HEADS, ToyWeights

_INT64, _FLOAT = TensorProto.INT64, TensorProto.FLOAT


class _Graph:
    """Nodes in the order in which they are made, and the constants that they use."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, values: NDArray[Any], name: str = "") -> str:
        name = name or f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def node(self, kind: str, *inputs: str, outputs: tuple[str, ...] = (), **attributes: Any) -> str:
        outputs = outputs or (f"value_{len(self.nodes)}",)
        self.nodes.append(helper.make_node(kind, inputs, outputs, **attributes))
        return outputs[0]


def onnx_toy(weights: ToyWeights) -> Any:
    """The graph, an `onnx.ModelProto`; see `outrider.testing.save_toy_model`."""
    graph = _Graph()

    def product(x: str, matrix: NDArray[np.float32], outputs: tuple[str, ...] = ()) -> str:
        return graph.node("MatMul", x, graph.constant(matrix), outputs=outputs)

    one, two, last = (graph.constant(np.array(n, dtype=np.int64)) for n in (1, [1], [-1]))
    seen = graph.node("ReduceSum", "attention_mask", two, keepdims=0)
    past_length = graph.node("Cast", graph.node("Sub", seen, two), to=TensorProto.INT32)
    total = graph.node("Gather", graph.node("Shape", "attention_mask"), one)
    total_length = graph.node("Cast", total, to=TensorProto.INT32)

    embedded = graph.node("Gather", graph.constant(weights.embedding), "input_ids")
    x = graph.node("Add", embedded, graph.node("Gather", graph.constant(weights.positions), "position_ids"))
    for i, layer in enumerate(weights.layers):
        attended = graph.node(
            "GroupQueryAttention",
            *(product(x, matrix) for matrix in (layer.query, layer.key, layer.value)),
            *(f"past_key_values.{i}.{kind}" for kind in ("key", "value")),
            past_length,
            total_length,
            outputs=(f"attended_{i}", f"present.{i}.key", f"present.{i}.value"),
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=HEADS,
        )
        x = graph.node("Add", x, product(attended, layer.output))
        x = graph.node("Add", x, product(graph.node("Tanh", product(x, layer.up)), layer.down))
        mean_square = graph.node("ReduceMean", graph.node("Mul", x, x), last)
        x = graph.node("Div", x, graph.node("Sqrt", mean_square))
    doubled = graph.node("Mul", x, graph.constant(np.array(2, dtype=np.float32)))
    ends = [graph.constant(np.array([n]), name) for name, n in (("rows_begin", 0), ("rows_end", 2**63 - 1))]
    product(graph.node("Slice", doubled, *ends, two), weights.output, outputs=("logits",))

    def port(name: str, kind: int, *shape: int | str) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    caches = [f"{i}.{kind}" for i in range(len(weights.layers)) for kind in ("key", "value")]
    inputs = [
        port("input_ids", _INT64, "batch", "length"),
        port("attention_mask", _INT64, "batch", "total"),
        port("position_ids", _INT64, "batch", "length"),
        *(port(f"past_key_values.{name}", _FLOAT, "batch", HEADS, "past", HEAD_SIZE) for name in caches),
        port("rows_begin", _INT64, 1),  # optional, with defaults
        port("rows_end", _INT64, 1),
    ]
    outputs = [
        port("logits", _FLOAT, "batch", "rows", weights.output.shape[1]),
        *(port(f"present.{name}", _FLOAT, "batch", HEADS, "total", HEAD_SIZE) for name in caches),
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    body = helper.make_graph(graph.nodes, "toy", inputs, outputs, graph.constants)
    model = helper.make_model(body, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model)
    return model
