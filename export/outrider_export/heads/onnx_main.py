"""A main model in ONNX for a drafter: its hidden states as outputs, and its matrices that the drafter shares.

Drafters are run by OpenVINO, which does not read these files. So the matrices are stored with the drafter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import ExportError, one_line
from outrider.models.backends.taps import LAST, after_layers
from outrider_export.heads.formats import EMBEDDING, MATRIX, HeadCheckpoint
from outrider_export.onnx.files import OnnxWeights, load
from outrider_export.onnx.graph import EXPORT_IT, FLOAT, find_head, graphs_of
from outrider_export.onnx.matrices import dequantise

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import onnxruntime as ort
    from numpy.typing import NDArray

    from outrider.bundle.manifest import Geometry


_NORM, _SUM_AND_NORM = "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"
_NORMED, _SUM = 0, 3  # outputs of the latter
_SUMS = 2  # of a layer: after its attention, and after its feed-forward part

Place = tuple[Any, int]  # a node, and the number of its output


def hidden_states_of(model: Any) -> dict[str, Place]:
    """Where a decoder's hidden states are made, by the names of `backends.taps`; empty if its form is unknown.

    Follows the residual stream from the output matrix back to the embedding. Each node on the way adds to it, and gives
    the sum and its norm, as onnxruntime-genai's model builder and onnxruntime's optimizer write it.
    """
    graph = model.graph
    places = {name: (node, i) for node in graph.node for i, name in enumerate(node.output) if name}
    floats = {tensor.name for tensor in graph.initializer if tensor.data_type == FLOAT}
    normed = {node.input[0] for node in graph.node if node.op_type == _NORM}
    last = find_head(graph).input[0]
    if last in places and places[last][0].op_type == "Slice":  # of `add_rows`
        last = places[last][0].input[0]
    sums: list[Place] = []
    place = places.get(last, (None, 0))
    number = _NORMED
    while place[0] is not None and place[0].op_type == _SUM_AND_NORM and place[1] == number:
        node, number = place[0], _SUM
        if node.input[2] not in floats:  # the norm's weights have the type of the stream
            return {}
        sums.append((node, _SUM))
        before = [places[name] for name in node.input[:2] if name in places]
        stream = [each for each in before if each[1] == _SUM or each[0].output[each[1]] in normed]
        if len(stream) != 1:
            return {}
        place = stream[0]
    sums.append(place)
    sums.reverse()
    num_layers = sum(node.op_type == "GroupQueryAttention" for node in graph.node)
    if place[0] is None or len(sums) != _SUMS * num_layers + 1:
        return {}
    return {after_layers(i): sums[_SUMS * i] for i in range(num_layers + 1)} | {LAST: places[last]}


def add_outputs(model: Any, found: dict[str, Place], names: Iterable[str], width: int) -> None:
    """Make outputs float32 [batch, length, width] of hidden states, by their names. Works in place."""
    from onnx import helper

    graph = model.graph
    there = {value.name for value in graph.output}
    for name in dict.fromkeys(names):  # of six layers, one is read twice
        node, i = found[name]
        if name in there:
            continue
        node.output.extend([""] * (i + 1 - len(node.output)))
        if old := node.output[i]:
            for value in [value for value in graph.value_info if value.name == old]:
                graph.value_info.remove(value)
            _rename(model, old, name)
        else:  # nothing has read it
            node.output[i] = name
        graph.output.append(helper.make_tensor_value_info(name, FLOAT, ["batch_size", "sequence_length", width]))


def _rename(model: Any, old: str, new: str) -> None:
    """Rename a tensor everywhere in the graph."""
    for graph in graphs_of(model.graph):
        for names in (each for node in graph.node for each in (node.input, node.output)):
            if new in names:
                raise ExportError(f"The model has a tensor of its own named {new}. {EXPORT_IT}")
            names[:] = [new if name == old else name for name in names]


_PIECE = 4096  # tokens whose embeddings are calculated at once


def share(
    path: Path, geometry: Geometry, head: HeadCheckpoint, token_ids: NDArray[np.int32] | None
) -> dict[str, NDArray[np.float32]]:
    """Make outputs of the hidden states that a drafter reads, and return the matrices that it lacks, float32.

    token_ids: int32 [n], the rows of the output matrix; None for all.

    Raises:
        ExportError: when the model's form is unknown. Its file is then as it was.
    """
    weights = OnnxWeights(load(path), path.parent)
    found = hidden_states_of(weights.model)
    head.check_features(found, geometry.num_layers)
    made: dict[str, NDArray[np.float32]] = {}
    if head.uses_main_embedding:
        made[EMBEDDING] = embedding_of(weights, geometry.logits_width, geometry.hidden_size)
    if head.uses_main_matrix:
        made[MATRIX] = output_matrix_of(weights, token_ids)
    _add_outputs_to(path, weights.model, found, head.features, geometry.hidden_size)
    return made


def tap(path: Path, names: Sequence[str], width: int) -> None:
    """Make outputs of a model's hidden states of this width, in its file.

    Raises:
        ExportError: when one is not found.
    """
    model = load(path)
    found = hidden_states_of(model)
    if missing := [name for name in names if name not in found]:
        raise ExportError(f"{path} has no hidden state {missing[0]!r} that is found in its graph. {EXPORT_IT}")
    _add_outputs_to(path, model, found, names, width)


def _add_outputs_to(path: Path, model: Any, found: dict[str, Place], names: Iterable[str], width: int) -> None:
    """`add_outputs`, in the file."""
    add_outputs(model, found, names, width)
    content = model.SerializeToString()
    path.unlink()  # it may be a link to the old bundle's
    path.write_bytes(content)


def embedding_of(weights: OnnxWeights, count: int, width: int) -> NDArray[np.float32]:
    """What the first layer reads for each of so many tokens, float32 [count, width]."""
    node, i = hidden_states_of(weights.model)[after_layers(0)]
    name = node.output[i]
    made = np.empty((count, width), dtype=np.float32)
    part = part_of(weights, ["input_ids"], name)
    for begin in range(0, len(made), _PIECE):
        token_ids = np.arange(begin, min(begin + _PIECE, len(made)), dtype=np.int64)
        made[begin : begin + _PIECE] = part.run(None, {"input_ids": token_ids[None]})[0][0]
    return made


def output_matrix_of(weights: OnnxWeights, token_ids: NDArray[np.int32] | None) -> NDArray[np.float32]:
    """Rows of the output matrix, float32 [rows, hidden]."""
    head = find_head(weights.model.graph)
    if head.op_type == "MatMulNBits":
        return dequantise(weights, head, token_ids)
    if head.op_type not in ("MatMul", "FusedMatMul"):
        raise ExportError(
            f"The main model's output matrix is read by {head.op_type}, as it cannot be here. {EXPORT_IT}"
        )
    name = head.input[1]
    matrix = weights.read(name) if name in weights else part_of(weights, [], name).run(None, {})[0]
    rows = matrix if any(each.name == "transB" and each.i for each in head.attribute) else matrix.T
    return np.ascontiguousarray(rows if token_ids is None else rows[token_ids], dtype=np.float32)


def part_of(weights: OnnxWeights, inputs: list[str], output: str) -> ort.InferenceSession:
    """The part of a model that makes one value of others, ready to run.

    Raises:
        ExportError: when it needs other inputs.
    """
    import onnxruntime as ort
    from onnx import helper
    from onnx.utils import Extractor

    extractor = Extractor(weights.model)
    for name in (*inputs, output):
        extractor.value_infos.setdefault(name, helper.make_tensor_value_info(name, FLOAT, None))
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised instead
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # it runs once
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights.folder))
    try:
        part = extractor.extract_model(inputs, [output]).SerializeToString()
        return ort.InferenceSession(part, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of several classes with no other common base
        raise ExportError(
            f"The main model's {output} cannot be computed alone: {one_line(error)}. {EXPORT_IT}"
        ) from error
