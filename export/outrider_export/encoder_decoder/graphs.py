"""Rewrites optimum's stateless IR of a decoder with cross-attention for the runtime, which owns all caches.

    decoder/openvino_decoder_model.xml            the first call: makes the cross-attention's keys and values
    decoder/openvino_decoder_with_past_model.xml  all further calls; with an empty past it is also right for the first

Of the first, only the part that makes cross-attention's keys and values is kept. The second becomes the decoder: it
gets inputs whose parts are contiguous in memory, returns the new rows of keys and values only, and computes the logits
of chosen rows.
"""

from __future__ import annotations

import re

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.bundle.manifest import Geometry
from outrider.errors import ExportError
from outrider.models.backends.nodes import floats, integer, ints, parameter, result

_PAST = re.compile(r"past_key_values\.(\d+)\.(decoder|encoder)\.(key|value)")
_MASKS = ("attention_mask", "encoder_attention_mask")


def cross_model(first: ov.Model, num_layers: int) -> ov.Model:
    """The keys and values of cross-attention, cross.i.key and cross.i.value, from encoder_hidden_states [1, n, hidden].

    Raises:
        ExportError: when the graph has other outputs.
    """
    results = [
        result(f"cross.{name}", _output_of(first, f"present.{name.replace('.', '.encoder.', 1)}"))
        for name in _names(num_layers)
    ]
    found = _parameters(first)
    states = found.pop("encoder_hidden_states")
    for node in found.values():  # some shapes are taken from the tokens, of which one is as good as any
        for port in node.output(0).get_target_inputs():
            port.replace_source_output(ops.constant(np.zeros((1, 1), dtype=np.int64)).output(0))
    states.set_partial_shape(ov.PartialShape([1, -1, states.get_partial_shape()[2]]))
    model = ov.Model(results, [states], "cross")
    model.validate_nodes_and_infer_types()
    return model


def decoder_model(later: ov.Model, geometry: Geometry) -> ov.Model:
    """The decoder, changed in place.

    Inputs: input_ids int64 [1, n], rows int64 [r]; pad, float32 [m, heads, head size]; past.i.key and past.i.value,
    float32 [length, heads, head size]; cross.i.key and cross.i.value, float32 [1, heads, source, head size]. Outputs:
    logits float32 [1, r, width] of these rows; new.i.key and new.i.value, float32 [n, heads, head size]. No token sees
    `pad`, which comes after the new rows in every layer's keys and values: with it, calls of all lengths get one
    number of keys.

    Raises:
        ExportError: when the graph has another form.
    """
    found = _parameters(later)
    sizes = geometry.num_kv_heads, geometry.head_size
    token_ids = found.pop("input_ids")
    token_ids.set_partial_shape(ov.PartialShape([1, -1]))
    pasts: dict[str, ov.Node] = {}
    crosses: dict[str, ov.Node] = {}
    for name in [*found]:
        if match := _PAST.fullmatch(name):
            layer, which, kind = match.groups()
            (pasts if which == "decoder" else crosses)[f"{layer}.{kind}"] = found.pop(name)
    if {*pasts} != {*_names(geometry.num_layers)} or {*crosses} != {*pasts}:
        raise ExportError(f"The converted decoder has no keys and values of {geometry.num_layers} layers.")
    results = [_new_rows(later, name, past) for name, past in pasts.items()]
    inputs = [token_ids, _pad_keys(later, {*map(_node_id, pasts.values())}, sizes)]
    for name, past in pasts.items():
        inputs.append(_with_rows_first(past, f"past.{name}", sizes))
    for name, cross in crosses.items():
        cross.set_partial_shape(ov.PartialShape([1, sizes[0], -1, sizes[1]]))
        cross.output(0).set_names({f"cross.{name}"})
        inputs.append(cross)
    first = crosses[min(crosses)]
    for name in [*found]:
        node = found.pop(name)
        if name in _MASKS:
            _without_mask(node, first)
        elif node.output(0).get_target_inputs():
            raise ExportError(f"The converted decoder reads {name}, which Outrider does not know.")
    inputs.append(_gather_rows(later))
    model = ov.Model([result("logits", _output_of(later, "logits")), *results], inputs, "decoder")
    model.validate_nodes_and_infer_types()
    return model


def encoder_model(encoder: ov.Model) -> ov.Model:
    """The encoder for one source: input_ids int64 [1, n] or input_features, to last_hidden_state [1, n, hidden]."""
    found = _parameters(encoder)
    values = found.pop("input_ids", None) or found.pop("input_features", None)
    if values is None:
        raise ExportError("The converted encoder reads neither input_ids nor input_features.")
    values.set_partial_shape(ov.PartialShape([1, *list(values.get_partial_shape())[1:]]))
    for name, node in found.items():
        if name not in _MASKS:
            raise ExportError(f"The converted encoder reads {name}, which Outrider does not know.")
        if node.output(0).get_target_inputs():
            for port in node.output(0).get_target_inputs():
                port.replace_source_output(_ones_like(values, 1).output(0))
    states = result("last_hidden_state", _output_of(encoder, "last_hidden_state"))
    model = ov.Model([states], [values], "encoder")
    model.validate_nodes_and_infer_types()
    return model


def _names(num_layers: int) -> list[str]:
    return [f"{i}.{kind}" for i in range(num_layers) for kind in ("key", "value")]


def _parameters(model: ov.Model) -> dict[str, ov.Node]:
    return {node.output(0).get_any_name(): node for node in model.get_parameters()}


def _output_of(model: ov.Model, name: str) -> ov.Output:
    try:
        return model.output(name).get_node().input_value(0)
    except RuntimeError as error:
        raise ExportError(f"The converted model has no output {name}, so Outrider does not run it.") from error


def _new_rows(model: ov.Model, name: str, past: ov.Node) -> ov.Node:
    """An output of the rows that a call adds to a layer's keys or values, float32 [n, heads, head size]."""
    joined = _output_of(model, f"present.{name.replace('.', '.decoder.', 1)}").get_node()
    if joined.get_type_name() != "Concat" or joined.input_value(0).get_node() != past:
        raise ExportError(f"The converted decoder does not append {name} to its past, so Outrider does not run it.")
    rows = ops.squeeze(ops.transpose(joined.input_value(1), ints(2, 0, 1, 3)), ints(1))
    return result(f"new.{name}", rows)


def _node_id(node: ov.Node) -> str:
    return str(node.get_friendly_name())


def _pad_keys(model: ov.Model, pasts: set[str], sizes: tuple[int, int]) -> ov.Node:
    """Append the new input `pad` to the keys and values of self-attention, and mask it; returns that input.

    Kernels add in an order that depends on the number of keys, so a row's bits do, too.
    """
    pad = parameter("pad", ov.Type.f32, (-1, *sizes))
    after = ops.transpose(ops.unsqueeze(pad, ints(1)), ints(1, 2, 0, 3))
    length = ops.gather(ops.shape_of(pad), ints(0), integer(0))
    ends = ops.concat([ints(0, 0, 0), length], 0)
    count = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() != "ScaledDotProductAttention":
            continue
        joined = [node.input_value(i).get_node() for i in (1, 2)]
        if any(each.get_type_name() != "Concat" for each in joined):
            continue  # cross-attention
        if {_node_id(each.input_value(0).get_node()) for each in joined} - pasts or len(node.inputs()) < 4:
            raise ExportError("The converted decoder's self-attention has another form than Outrider knows.")
        for i, each in enumerate(joined, 1):
            node.input(i).replace_source_output(ops.concat([each, after], 2).output(0))
        hidden = floats(np.finfo(np.float32).min)
        mask = ops.pad(node.input_value(3), ints(0, 0, 0, 0), ends, "constant", hidden)
        node.input(3).replace_source_output(mask.output(0))
        count += 1
    if 2 * count != len(pasts):
        raise ExportError(
            f"The converted decoder has {count} layers of self-attention, and {len(pasts)} inputs for their past."
        )
    return pad


def _with_rows_first(past: ov.Node, name: str, sizes: tuple[int, int]) -> ov.Node:
    """An input [length, heads, head size] in place of [1, heads, length, head size]. Its first rows are contiguous."""
    made = parameter(name, ov.Type.f32, (-1, *sizes))
    before = ops.transpose(ops.unsqueeze(made, ints(1)), ints(1, 2, 0, 3))
    for port in past.output(0).get_target_inputs():
        port.replace_source_output(before.output(0))
    return made


def _without_mask(mask: ov.Node, cross: ov.Node) -> None:
    """One source has no padding: put ones in place of the mask of the encoder's positions."""
    for port in mask.output(0).get_target_inputs():
        port.replace_source_output(_ones_like(cross, 2).output(0))


def _ones_like(node: ov.Node, axis: int) -> ov.Node:
    """Ones, int64 [1, n], for each position along an axis of a node's output."""
    length = ops.gather(ops.shape_of(node), ints(axis), integer(0))
    return ops.broadcast(integer(1), ops.concat([ints(1), length], 0))


def _gather_rows(model: ov.Model) -> ov.Node:
    """Compute the logits of chosen rows only; returns the new input `rows`, int64 [r]."""
    node = _output_of(model, "logits").get_node()
    while node.get_type_name() != "MatMul":  # past biases and scales
        if not node.inputs():
            raise ExportError("The converted model's logits are not made by a matrix product.")
        node = node.input_value(0).get_node()
    rows = parameter("rows", ov.Type.i64, (-1,))
    chosen = ops.gather(node.input_value(0), rows, integer(1))
    node.input(0).replace_source_output(chosen.output(0))
    return rows
