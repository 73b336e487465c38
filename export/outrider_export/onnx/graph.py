"""A decoder's ONNX graph and its properties.

    model = load(path)                                  # `files`: the graph alone; weights stay in their files
    weights_of(model)
    add_rows(model)                                     # `inputs`
    save(model, path.parent, folder)                    # `files`: model.onnx, model.onnx.data
    check_onnx(folder / "model.onnx", geometry)         # `check`

A bundle's model takes input_ids, attention_mask, perhaps position_ids, and past_key_values.{i}.key and .value. It gives
logits, present.{i}.key and .value. The runtime binds one buffer [1, kv heads, longest, head size] per tensor as past
and as present, which only GroupQueryAttention allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from outrider.errors import ExportError

ROWS = ("rows_begin", "rows_end")
EXTRA = "extra_rows"
FLOAT, INT64 = 1, 7  # onnx.TensorProto's numbers for them
_PRODUCTS = ("MatMulNBits", "MatMulBnb4", "MatMul", "FusedMatMul")
_ELEMENTWISE = ("Mul", "Div", "Add", "Sub", "Tanh", "Cast", "Identity")
_BITS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
EXPORT_IT = "Export the model from its checkpoint instead: outrider export MODEL --format onnx."


def weights_of(model: Any) -> str:
    """ "int8" or "int4", by the bits of most of its matrices; "fp32" if none is quantised."""
    held = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    bits: Counter[int] = Counter()
    for node in model.graph.node:
        if node.op_type in ("MatMulNBits", "MatMulBnb4"):
            bits[attribute_of(node, "bits") or 4] += 1
        elif node.op_type == "DequantizeLinear" and (width := _BITS.get(type_name(held.get(node.input[0], 0)))):
            bits[width] += 1
    return f"int{bits.most_common(1)[0][0]}" if bits else "fp32"


def find_head(graph: Any) -> Any:
    """The node that multiplies the last hidden states by the output matrix."""
    maker = {name: node for node in graph.node for name in node.output}
    fixed = {tensor.name for tensor in graph.initializer}
    fixed |= {name for name, node in maker.items() if node.op_type == "Constant"}
    name, ops = "logits", []
    while (node := maker.get(name)) is not None:
        if node.op_type in _PRODUCTS:
            return node
        ops.append(node.op_type)
        moving = [i for i in node.input if i and i not in fixed]
        if node.op_type not in _ELEMENTWISE or len(moving) != 1:
            break
        name = moving[0]
    raise ExportError(
        f"The model's logits are made by {' of '.join(ops) or 'nothing'}; Outrider looks for a product with the output "
        f"matrix ({' or '.join(_PRODUCTS)}) there. {EXPORT_IT}"
    )


def is_past(name: str) -> bool:
    """Whether an input is a part of the cache."""
    return name.startswith("past_key_values.")


def dim_of(value: Any, axis: int) -> int | None:
    """A dimension of an input or output; None if it is not a number."""
    dims = value.type.tensor_type.shape.dim if value is not None else ()
    return int(dims[axis].dim_value) if axis < len(dims) and dims[axis].HasField("dim_value") else None


def attribute_of(node: Any, name: str) -> int | None:
    """A node's attribute that is an integer; None if it has none of this name."""
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), None)


def type_name(kind: int) -> str:
    """The name of an element type, such as "float16"."""
    from onnx import TensorProto

    return str(TensorProto.DataType.Name(kind)).lower()


def graphs_of(graph: Any) -> Iterator[Any]:
    """A graph and those inside its nodes, as the branches of an If."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from graphs_of(inner)
