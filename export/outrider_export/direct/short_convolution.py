"""The graph of a layer with a short convolution.

It has the form that OpenVINO's `paged_attention_transformation` replaces with PagedCausalConv1D: the state is gathered
by beam_idx, tokens are put behind it, and the last columns are the next state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino.op import util

from outrider.models.backends.taps import ints

_END = 2**63 - 1
_LAST = 2  # the axis of tokens


def gated_convolution(
    x: ov.Node, convolve: Callable[[ov.Node], ov.Node], project: Callable[[str, ov.Node], ov.Node]
) -> ov.Node:
    """C · conv(B · u), with B, C and u of one projection; float32 [batch, tokens, width].

    project: the product with one of the layer's matrices, by name.
    """
    swap = ops.constant(np.array([0, 2, 1], np.int32))
    joined = ops.transpose(project("conv.in_proj", x), swap)
    gate, out_gate, u = ops.split(joined, ops.constant(np.int64(1)), 3).outputs()
    found = ops.multiply(out_gate, convolve(ops.multiply(gate, u)))
    return project("conv.out_proj", ops.transpose(found, swap))


def causal_convolution(
    x: ov.Node,
    weight: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
    batch: ov.Node,
    beam_idx: ov.Node,
    name: str,
) -> tuple[ov.Node, ov.Node]:
    """A depthwise convolution of x float32 [batch, width, tokens] and the state `name`; and what stores the state.

    weight: [width, kernel]. batch: int64 [1].
    """
    width, kernel = weight.shape
    info = util.VariableInfo()
    info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, width, kernel]), ov.Type.f32, name
    variable = util.Variable(info)
    empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([batch, ints(width, kernel)], 0))
    past = ops.gather(ov.op.read_value(empty, variable), beam_idx, ops.constant(np.int64(0)))
    whole = ops.concat([past, x], -1)
    filters = ops.constant(np.ascontiguousarray(weight, np.float32).reshape(width, 1, 1, kernel))
    found = ops.group_convolution(whole, filters, [1], [0], [0], [1])
    count = ops.gather(ops.shape_of(x, "i64"), ints(_LAST), ops.constant(np.int64(0)))
    found = ops.slice(found, ops.negative(count), ints(_END), ints(1), ints(_LAST))
    if bias is not None:
        found = ops.add(found, ops.constant(bias.astype(np.float32).reshape(1, width, 1)))
    kept = ops.slice(whole, ints(-kernel), ints(_END), ints(1), ints(_LAST))
    return found, ov.op.assign(kept, variable)
