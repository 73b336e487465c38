"""Cuts a model's output matrix to some of its rows, whatever its weights are stored as.

    cut_output(model, np.array([0, 1, 2, 151_645]))    # model, an ov.Model, now gives four logits, those of these ids

A row of the matrix is one token's logit. The embedding is left as it is, also where both are one (tied embeddings):
the model still reads every token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import ExportError
from outrider_export.four_bits import pack, unpack

if TYPE_CHECKING:
    import openvino as ov
    from numpy.typing import NDArray

# What stands between weights and their use (optimum-intel, nncf, openvino-genai's GGUF reader), and keeps rows apart.
_ELEMENTWISE = ("Convert", "Subtract", "Multiply", "Add", "Divide")


def cut_output(model: ov.Model, token_ids: NDArray[np.int32]) -> None:
    """Keep the logits of `token_ids`, int32 [n], in this order. Works in place.

    Raises:
        ExportError: if the logits are not made in a way that is known here.
    """
    width = model.output("logits").get_partial_shape()[-1].get_length()
    # The matrix and what follows are taken from a clone: what the embedding shares with them stays as it is.
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
    """Keep `token_ids` of the `width` rows of what comes in at `port`, which lie along `axis`, counted from the end."""
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
    """Whether a Reshape leaves the axes up to `axis`, counted from the beginning, as they are."""
    before, after = list(reshape.get_input_shape(0)), list(reshape.get_output_shape(0))
    return before[: axis + 1] == after[: axis + 1]


def _take(constant: Any, token_ids: NDArray[np.int32], axis: int) -> ov.Node:
    """Some rows of a constant, with the bits that they have."""
    import openvino

    kind = constant.get_element_type()
    if kind.bitwidth == 4:  # a row may begin inside a byte
        return pack(np.take(unpack(constant), token_ids, axis), kind)
    if kind.bitwidth % 8:
        raise ExportError(f"The draft model's output matrix is {kind.get_type_name()}: export with --draft-vocab all.")
    taken = np.ascontiguousarray(np.take(constant.data, token_ids, axis))
    # A copy: a constant that shares the memory does not keep it alive.
    return openvino.op.Constant(openvino.Tensor(taken, openvino.Shape(taken.shape), kind), shared_memory=False)
