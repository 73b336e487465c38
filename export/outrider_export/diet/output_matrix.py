"""Cuts a model's output matrix to some of its rows, for any format of its weights.

A row of the matrix is for one token's logit. The embedding is not cut, even if both are tied: the model still reads
every token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import ExportError
from outrider_export.direct.codes import pack, unpack

if TYPE_CHECKING:
    import openvino as ov
    from numpy.typing import NDArray

# Operations between weights and their use (optimum-intel, nncf, openvino-genai's GGUF reader) that work row by row.
_ELEMENTWISE = ("Convert", "Subtract", "Multiply", "Add", "Divide")


def cut_output(model: ov.Model, token_ids: NDArray[np.int32]) -> None:
    """Cut the logits to `token_ids`, int32 [n], in this order. Works in place.

    Raises:
        ExportError: if the nodes that make the logits are unknown.
    """
    width = model.output("logits").get_partial_shape()[-1].get_length()
    # Use a clone's nodes for the matrix and what follows, so that nodes shared with the embedding are not changed.
    clone = model.clone()
    result, head = model.output("logits").get_node(), clone.output("logits").get_node()
    body, node = result.input_value(0).get_node(), head.input_value(0).get_node()
    while node.get_type_name() != "MatMul":  # a bias, scales, soft caps and conversions follow the product
        if not node.inputs():
            raise ExportError("The draft model's logits are not made by a MatMul: export with --draft-vocab all.")
        for port in node.inputs()[1:]:
            _cut(port, -1, width, token_ids)
        body, node = body.input_value(0).get_node(), node.input_value(0).get_node()
    axis = -2 if node.get_attributes()["transpose_b"] else -1
    _cut(node.input(1), axis, width, token_ids)
    node.input(0).replace_source_output(body.input_value(0))
    result.input(0).replace_source_output(head.input_value(0))
    model.validate_nodes_and_infer_types()


def _cut(port: ov.Input, axis: int, width: int, token_ids: NDArray[np.int32]) -> None:
    """Cut the input `port` to `token_ids` of its `width` rows along `axis`, counted from the end."""
    from openvino import opset13 as ops

    node = port.get_source_output().get_node()
    kind, shape = node.get_type_name(), list(node.get_output_shape(0))
    if len(shape) < -axis or shape[axis] == 1:  # one value for all rows
        return
    if shape[axis] == width and kind == "Constant":
        port.replace_source_output(_take(node, token_ids, axis).output(0))
    elif shape[axis] == width and kind in _ELEMENTWISE:
        for own in node.inputs():
            _cut(own, axis, width, token_ids)
    elif shape[axis] == width and kind == "Reshape" and _keeps_first(node, len(shape) + axis):
        grouped = list(node.get_input_shape(0))  # [rows, groups, columns of a group] become [rows, columns]
        _cut(node.input(0), len(shape) + axis - len(grouped), width, token_ids)
        shape[axis] = len(token_ids)
        node.input(1).replace_source_output(ops.constant(np.array(shape, dtype=np.int64)).output(0))
    else:
        raise ExportError(
            f"The draft model's output matrix goes through a {kind} {shape}, which cannot be cut to fewer rows: export "
            "with --draft-vocab all."
        )


def _keeps_first(reshape: ov.Node, axis: int) -> bool:
    """Whether a Reshape does not change the axes up to `axis`, counted from the beginning."""
    before, after = list(reshape.get_input_shape(0)), list(reshape.get_output_shape(0))
    return before[: axis + 1] == after[: axis + 1]


def _take(constant: Any, token_ids: NDArray[np.int32], axis: int) -> ov.Node:
    """Some rows of a constant, bit for bit."""
    import openvino

    kind = constant.get_element_type()
    if kind.bitwidth == 4:  # a row may start within a byte
        return pack(np.take(unpack(constant), token_ids, axis), kind)
    if kind.bitwidth % 8:
        raise ExportError(f"The draft model's output matrix is {kind.get_type_name()}: export with --draft-vocab all.")
    taken = np.ascontiguousarray(np.take(constant.data, token_ids, axis))
    # A copy: a constant that shares the memory does not keep it alive.
    return openvino.op.Constant(openvino.Tensor(taken, openvino.Shape(taken.shape), kind), shared_memory=False)
