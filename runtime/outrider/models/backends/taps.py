"""Hidden states of a decoder: finds them in its graph, and makes outputs of them."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Container, Iterable
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.errors import BundleError, one_line
from outrider.models.backends.nodes import ints, result

PAGED = "PagedAttentionExtension"
_CONVOLUTION = "PagedCausalConv1D"
_RECURRENT = ("PagedGatedDeltaNet", "PagedSelectiveSSM")  # there is a convolution in their layers, too
LAST = "last_hidden_state"  # after the final norm: what the output matrix reads
_LAYER = "hidden_states."  # after so many layers, and before any norm; 0 is the embedding
ROOM = 64  # bytes of the widest vector
_IDENTITY = 32  # rows of the matrix after each output
_ADDS = 2  # of a layer to the residual stream: of its attention, and of its feed-forward part


def after_layers(count: int) -> str:
    """The name of the hidden states after the first `count` layers, as `hidden_states[count]` in Transformers."""
    return f"{_LAYER}{count}"


def hidden_states_of(model: ov.Model, num_layers: int | None = None) -> dict[str, ov.Output]:
    """A decoder's hidden states by name; empty if its graph has another form than expected.

    num_layers: with attention or a state; None for as many as there are found.

    Follows the residual stream from the output matrix back to the embedding: it consists of additions of two values
    that both depend on the input, two for each layer (Llama, Qwen2, Qwen3 and the like). Where sums are multiplied by a
    number, they are those at layers' ends (Gemma 4).
    """
    matrix = output_matrix_of(model)
    if matrix is None:
        return {}
    last = multiplied_by(matrix)
    stream = _sum_before(last)
    sums: list[ov.Output] = []
    ends: list[int] = []  # of the sums that are scaled, counted from the last one
    while stream is not None:
        sums.append(_scaled(stream))
        if sums[-1] != stream:
            ends.append(len(sums) - 1)
        # The stream is read by the norm and by the next addition; what a layer adds to it, by the addition alone.
        former = [each for each in stream.get_node().input_values() if len(each.get_target_inputs()) > 1]
        if len(former) != 1:
            return {}
        stream = _unscaled(former[0])
        if not _is_sum(stream):
            sums.append(former[0])
            break
    sums.reverse()
    adds = ends[1] if len(ends) > 1 else len(sums) - 1 if ends else _ADDS  # of a layer
    found = len(sums) // adds
    if len(sums) != adds * found + 1 or num_layers not in (None, found):
        return {}
    if ends and ends != [*range(0, len(sums) - 1, adds)]:
        return {}
    return {after_layers(i): sums[adds * i] for i in range(found + 1)} | {LAST: last}


def num_paged_layers(model: ov.Model) -> int:
    """How many layers a decoder with a paged cache has, each with attention or a state."""
    kinds = Counter(node.get_type_name() for node in model.get_ops())
    return kinds[PAGED] + max(kinds[_CONVOLUTION], sum(kinds[kind] for kind in _RECURRENT))


def read_ir(core: ov.Core, path: Path) -> ov.Model:
    """Read a file in OpenVINO's format. Its weights stay in the file, which is mapped, if there is room after its end.

    Without room, weights are read into memory: kernels may read a few bytes more than the last weight has, and after
    the file's last page the next one may be unmapped.

    Raises:
        BundleError: when it cannot be read.
    """
    try:
        return core.read_model(path, config={"ENABLE_MMAP": has_room(path.with_suffix(".bin"))})
    except RuntimeError as error:
        raise BundleError(f"{path} cannot be read by OpenVINO: {one_line(error)}. Export the bundle again.") from error


def has_room(weights: Path) -> bool:
    """Whether `ROOM` bytes after the end of a mapped file can be read: the rest of its last page."""
    try:
        return -weights.stat().st_size % mmap.PAGESIZE >= ROOM
    except OSError:
        return True  # the reader says what is wrong


def output_matrix_of(model: ov.Model) -> ov.Node | None:
    """The product that makes the logits; None if there is none."""
    node = model.output("logits").get_node().input_value(0).get_node()
    while node.get_type_name() != "MatMul":  # past conversions, scales and soft caps
        if not node.inputs():
            return None
        node = node.input_value(0).get_node()
    return node


def multiplied_by(matrix: ov.Node) -> ov.Output:
    """The rows that a matrix is multiplied by, without the sums of them that follow for own codes of 4 bits."""
    rows = matrix.input_value(0)
    return rows.get_node().input_value(0) if rows.get_node().get_type_name() == "Concat" else rows


def add_outputs(model: ov.Model, found: dict[str, ov.Output], names: Iterable[str]) -> None:
    """Make outputs float32 [n, width] of hidden states [n, 1, width], by their names. No bit of the logits changes."""
    model.add_results([result(name, rows_of(found[name])) for name in names])
    model.validate_nodes_and_infer_types()


def rows_of(state: ov.Output) -> ov.Node:
    """Hidden states [n, 1, width] as float32 [n, width], for an output.

    The CPU plugin (2026.4) calculates in single precision what is between an output and the products before it
    (`Graph::EnforceInferencePrecision`). In bf16, the sums of the residual stream would get other bits. So they are
    after a product of their own, with an identity matrix.
    """
    width = state.get_partial_shape()[2].get_length()
    size = math.gcd(width, _IDENTITY)
    part = ops.reshape(state, ints(-1, size), special_zero=False)
    same = ops.matmul(part, ops.constant(np.eye(size, dtype=np.float32)), False, False)
    return ops.convert(ops.reshape(same, ints(-1, width), special_zero=False), "f32")


def above(*nodes: ov.Node, ends: Container[str] = ()) -> dict[str, ov.Node]:
    """Nodes and all that they depend on, by name, up to the nodes of the names `ends`, which are left out."""
    found: dict[str, ov.Node] = {}
    left = [*nodes]
    while left:
        node = left.pop()
        name = node.get_name()
        if name not in found and name not in ends:
            found[name] = node
            left += [each.get_node() for each in node.input_values()]
    return found


def is_weight(value: ov.Output) -> bool:
    """Whether a value is made of constants: a weight, compressed or not."""
    node = value.get_node()
    if node.get_type_name() in ("Convert", "Multiply", "Reshape", "Subtract", "Transpose"):
        return all(map(is_weight, node.input_values()))
    return bool(node.get_type_name() == "Constant")


def _sum_before(output: ov.Output) -> ov.Output | None:
    """The nearest sum of two values before this one, past the norm."""
    while not _is_sum(output):
        ahead = [each for each in output.get_node().input_values() if not is_weight(each)]
        if not ahead:
            return None
        output = ahead[0]
    return output


def _scaled(total: ov.Output) -> ov.Output:
    """A sum, or its product with one number, if that alone is read."""
    readers = [*total.get_target_inputs()]
    node = readers[0].get_node() if len(readers) == 1 else None
    return total if node is None or _unscaled(node.output(0)) != total else node.output(0)


def _unscaled(value: ov.Output) -> ov.Output:
    """What is multiplied by one number; the value itself if it is no such product."""
    node = value.get_node()
    if node.get_type_name() != "Multiply":
        return value
    sides = list(node.input_values())
    numbers = [is_weight(each) and math.prod(each.get_shape()) == 1 for each in sides]
    return sides[numbers.index(False)] if sum(numbers) == 1 else value


def _is_sum(output: ov.Output) -> bool:
    """Whether this is the sum of two values that depend on the input."""
    node = output.get_node()
    return node.get_type_name() == "Add" and not any(map(is_weight, node.input_values()))
