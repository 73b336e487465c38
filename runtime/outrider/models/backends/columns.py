"""Appends columns of zeros to products, for a kernel that adds in one order whatever the number of rows.

    can_append(model)                 # whether a graph has such products, and the zeros are few
    append_columns(model, COLUMNS)    # in place, before it is compiled

The CPU plugin (OpenVINO 2026.4) chooses how it divides the sum of a product with 8-bit weights by the number of rows.
On processors with AVX2 alone, a row has the same bits in calls of 2 to 16 rows up to 4,096 columns, of 5 to 16 rows up
to 8,192 columns, and of any number up to 16 rows beyond. So one product of 8,192 columns makes calls of one row as slow
as those of five. The columns' zeros change no sum: each adds 0.
"""

from __future__ import annotations

import math

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.models.backends.nodes import ints
from outrider.models.backends.taps import output_matrix_of

COLUMNS = 8_224  # the least multiple of 32 beyond 8,192
_LEAST_COLUMNS = 4_097  # of a product that is widened
_MOST_MORE = 0.25  # weights that are added, as a share of all 8-bit weights
_MATRIX = 2  # axes
_DECOMPRESSION = ("Convert", "Multiply", "Subtract")
_KINDS = (ov.Type.u8, ov.Type.i8)


def can_append(model: ov.Model) -> bool:
    """Whether a decoder has products to be widened, and this adds few weights."""
    shapes = [weight.get_output_shape(0) for _, weight in _products(model, COLUMNS)]
    added = sum(num_rows * (COLUMNS - num_columns) for num_rows, num_columns in shapes)
    weights = filter(_is_weight, model.get_ops())
    return bool(0 < added <= _MOST_MORE * sum(math.prod(node.get_output_shape(0)) for node in weights))


def has_dependent(model: ov.Model) -> bool:
    """Whether a decoder has products in which few rows have other bits than more of them."""
    shapes = (node.input_value(1).get_partial_shape() for node in model.get_ops() if node.get_type_name() == "MatMul")
    matrices = (shape for shape in shapes if shape.rank.get_length() == _MATRIX and shape[-1].is_static)
    columns: list[int] = [shape[-1].get_length() for shape in matrices]
    return any(_LEAST_COLUMNS <= count < COLUMNS for count in columns)


def append_columns(model: ov.Model, columns: int) -> None:
    """Widen a decoder's products to so many columns, in place; 0: not at all.

    Only to products with weights in 8 bits with a scale for each row, and not to the output matrix. Their weights are
    copied, one after the other.
    """
    if not columns:
        return
    padded: dict[tuple[str, int], ov.Output] = {}
    for product, weight in _products(model, columns):
        num_rows, num_columns = weight.get_output_shape(0)
        source = product.input_value(0)
        key = source.get_node().get_name(), source.get_index()
        if key not in padded:  # several products read it
            begins = [0] * source.get_partial_shape().rank.get_length()
            ends = [*begins[:-1], columns - num_columns]
            zero = ops.constant(0, source.get_element_type())
            padded[key] = ops.pad(source, ints(*begins), ints(*ends), "constant", zero).output(0)
        product.input(0).replace_source_output(padded[key])
        values = np.zeros((num_rows, columns), weight.get_output_element_type(0).to_dtype())
        values[:, :num_columns] = weight.get_data()
        wider = ops.constant(values)  # which copies them
        wider.set_friendly_name(weight.get_friendly_name())
        for reader in weight.output(0).get_target_inputs():
            reader.replace_source_output(wider.output(0))
    model.validate_nodes_and_infer_types()


def _products(model: ov.Model, columns: int) -> list[tuple[ov.Node, ov.Node]]:
    """The products to be widened, each with its weight."""
    matrix = output_matrix_of(model)
    found = []
    for node in model.get_ops():
        if node.get_type_name() != "MatMul" or node == matrix:
            continue
        transposed = node.get_attributes()
        if transposed["transpose_a"] or not transposed["transpose_b"]:
            continue
        weight = _weight_of(node.input_value(1))
        if weight is not None and _LEAST_COLUMNS <= weight.get_output_shape(0)[1] < columns:
            found.append((node, weight))
    return found


def _weight_of(value: ov.Output) -> ov.Node | None:
    """The weight [rows, columns] in 8 bits that a value is calculated from; None if there is another one.

    No other node reads it, and scales and zero points are of whole rows.
    """
    node = value.get_node()
    while node.get_type_name() in _DECOMPRESSION:
        if len(node.output(0).get_target_inputs()) != 1:
            return None
        _, *factors = node.input_values()
        if any([*each.get_shape()][-1:] not in ([], [1]) for each in factors):
            return None
        node = node.input_value(0).get_node()
    is_alone = len(node.output(0).get_target_inputs()) == 1
    return node if is_alone and _is_weight(node) else None


def _is_weight(node: ov.Node) -> bool:
    """Whether this is a matrix of weights in 8 bits."""
    if node.get_type_name() != "Constant" or node.get_output_element_type(0) not in _KINDS:
        return False
    return len(node.get_output_shape(0)) == _MATRIX
