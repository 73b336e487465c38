"""Small parts of graphs: constants, inputs and outputs, and two operators in the form that OpenVINO's passes find."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import ArrayLike
from openvino import opset13 as ops
from openvino.utils.node_factory import NodeFactory

END = 2**63 - 1  # of an axis, for slices


def integer(number: int) -> ov.Node:
    """A constant, int64 []."""
    return ops.constant(np.int64(number))


def ints(*numbers: int) -> ov.Node:
    """A constant, int64 [n]."""
    return ops.constant(np.array(numbers, dtype=np.int64))


def floats(values: ArrayLike) -> ov.Node:
    """A constant, float32."""
    return ops.constant(np.asarray(values, dtype=np.float32))


def size_of(x: ov.Node, axis: int) -> ov.Node:
    """The length of an axis, int64 []."""
    return ops.gather(ops.shape_of(x, "i64"), integer(axis), integer(0))


def parameter(name: str, kind: ov.Type, shape: tuple[int, ...]) -> Any:
    """An input of the graph."""
    made = ops.parameter(list(shape), dtype=kind, name=name)
    made.output(0).set_names({name})
    return made


def result(name: str, value: ov.Node) -> Any:
    """An output of the graph."""
    made = ops.result(value)
    made.output(0).set_names({name})
    return made


def transposed(x: ov.Node | ov.Output, *axes: int) -> ov.Node:
    """x with its axes in this order."""
    return ops.transpose(x, ops.constant(np.array(axes, np.int32)))


def silu(x: ov.Node) -> ov.Node:
    """x · sigmoid(x), as one operator without a factor: `ops.swish` adds one of 1."""
    return NodeFactory("opset4").create("Swish", [x.output(0)], {})
