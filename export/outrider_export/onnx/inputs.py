"""Adds inputs to an ONNX graph for a bundle; see `onnx.graph`."""

from __future__ import annotations

from math import prod
from typing import Any

from outrider.errors import ExportError
from outrider_export.onnx.graph import EXPORT_IT, EXTRA, INT64, ROWS, dim_of, find_head, is_past


def add_rows(model: Any) -> None:
    """Let a model compute logits for some rows only: rows_begin ≤ row < rows_end, int64 [1] each; by default all.

    The output matrix is then applied to those rows, and `logits` is float32 [batch, rows, logits width]. A model that
    has these inputs is not changed.

    Raises:
        ExportError: if `logits` is not a product of all rows with a matrix.
    """
    graph = model.graph
    if ROWS[0] in (value.name for value in graph.input):
        return
    head = find_head(graph)
    if dim_of(_output(graph, "logits"), 1) is not None:
        raise ExportError(f"The model gives the logits of its last token only; drafts need more. {EXPORT_IT}")
    add_default(model, ROWS[0], 0)
    add_default(model, ROWS[1], 2**63 - 1)
    axis = _constant("rows_axis", 1, [1])
    graph.initializer.append(axis)
    rows = _node("Slice", [head.input[0], *ROWS, axis.name], ["/rows/output_0"], "/rows")
    head.input[0] = rows.output[0]
    graph.node.insert(list(graph.node).index(head), rows)
    _output(graph, "logits").type.tensor_type.shape.dim[1].dim_param = "rows"


def add_extra_rows(model: Any) -> None:
    """Give only the attention rows of zeros after the tokens: extra_rows, int64 [1]; by default none.

    Attention has another kernel for one row than for more, so a single token gets other bits than with others. The
    products with weights do not have this problem. With one more row in the attention, a single token has the same bits
    as with others, without a second row through the whole model. attention_mask then counts the extra rows, too. A
    model that has this input, or whose attention gets positions or biases of each row, is not changed.
    """
    graph = model.graph
    attentions = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    if EXTRA in (value.name for value in graph.input) or any(any(node.input[9:11]) for node in attentions):
        return
    add_default(model, EXTRA, 0)
    first, axis = _constant("extra_first", 0, [1]), _constant("extra_axis", 1, [1])
    before = _constant("extra_before", 0, [4])
    graph.initializer.extend([first, axis, before])
    count = _node("Shape", ["input_ids"], ["/extra/count"], "/extra/Shape", start=1, end=2)
    pads = _node("Concat", [before.name, EXTRA, first.name], ["/extra/pads"], "/extra/Concat", axis=0)
    for node in attentions:
        at = list(graph.node).index(node)
        for i, name in enumerate(node.input[:3]):
            if name:  # one packed input or three
                pad = _node("Pad", [name, pads.output[0]], [f"{node.name}/extra/{i}"], f"{node.name}/extra/Pad_{i}")
                node.input[i] = pad.output[0]
                graph.node.insert(at, pad)
        whole = f"{node.name}/extra/output"
        inputs = [whole, first.name, count.output[0], axis.name]
        cut = _node("Slice", inputs, [node.output[0]], f"{node.name}/extra/Slice")
        node.output[0] = whole
        graph.node.insert(list(graph.node).index(node) + 1, cut)
    for made in (pads, count):
        graph.node.insert(0, made)


def add_default(model: Any, name: str, value: int) -> None:
    """Give the int64 input `name` a default value. It is added, as int64 [1], if it is missing."""
    from onnx import helper

    given = {value.name: value for value in model.graph.input}
    if name not in given:
        given[name] = helper.make_tensor_value_info(name, INT64, [1])
        model.graph.input.append(given[name])
    model.graph.initializer.append(_constant(name, value, [1] * len(given[name].type.tensor_type.shape.dim)))


def write_head_size(graph: Any, size: int) -> None:
    """Write the head size, which the runtime reads, to a cache that leaves it open."""
    for value in (*graph.input, *graph.output):
        if is_past(value.name) or value.name.startswith("present."):
            value.type.tensor_type.shape.dim[3].dim_value = size


def _output(graph: Any, name: str) -> Any:
    return next((value for value in graph.output if value.name == name), None)


def _constant(name: str, value: int, dims: list[int]) -> Any:
    from onnx import helper

    return helper.make_tensor(name, INT64, dims, [value] * prod(dims))


def _node(op: str, inputs: list[str], outputs: list[str], name: str, **attributes: int) -> Any:
    from onnx import helper

    return helper.make_node(op, inputs, outputs, name=name, **attributes)
