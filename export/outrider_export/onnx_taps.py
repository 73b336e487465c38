"""Hidden states of a decoder in ONNX: finds them in its graph, and makes outputs of them.

See `outrider.models.backends.taps`.

    found = hidden_states_of(model)
    add_outputs(model, found, ["hidden_states.2", "last_hidden_state"], width=576)

A value gets the output's name where it is made: no node is added, and nothing is copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.models.backends.taps import LAST, after_layers
from outrider_export.onnx_graph import FLOAT, find_head
from outrider_export.onnx_inputs import rename

if TYPE_CHECKING:
    from collections.abc import Iterable

_NORM, _SUM_AND_NORM = "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"
_NORMED, _SUM = 0, 3  # outputs of the latter
_SUMS = 2  # of a layer: behind its attention, and behind its feed-forward part

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
    for name in names:
        node, i = found[name]
        if name in there:
            continue
        node.output.extend([""] * (i + 1 - len(node.output)))
        if old := node.output[i]:
            for value in [value for value in graph.value_info if value.name == old]:
                graph.value_info.remove(value)
            rename(model, {old: name})
        else:  # nothing has read it
            node.output[i] = name
        graph.output.append(helper.make_tensor_value_info(name, FLOAT, ["batch_size", "sequence_length", width]))
