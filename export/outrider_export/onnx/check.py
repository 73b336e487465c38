"""Checks that a model in ONNX fits into a bundle and matches its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.bundle.manifest import Geometry
from outrider.errors import ExportError
from outrider.models.backends.attention import SLIDING, describe_windows
from outrider_export.onnx.files import data_files, load
from outrider_export.onnx.graph import (
    EXPORT_IT,
    EXTRA,
    FLOAT,
    INT64,
    ROWS,
    OnnxShape,
    attribute_of,
    dim_of,
    is_past,
    shape_of,
    type_name,
)

_INPUTS = ("input_ids", "attention_mask", "position_ids")
_CACHE = ("key", "value")
# They use one scale for all rows.
_MIX_ROWS = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul")


def check_onnx(path: Path, geometry: Geometry) -> tuple[int, ...]:
    """Check that the model at `path` fits into a bundle, and has its source's shape.

    Returns the sliding window of each layer, which are those of `geometry` if these are known.

    Raises:
        ExportError: with the differences.
    """
    model = load(path)
    check_graph(model, path, geometry)
    if missing := [name for name in ROWS if name not in (value.name for value in model.graph.input)]:
        raise ExportError(f"{path} has no input {missing[0]}: it was not finished. Export it again.")
    data_files(model, path.parent)
    return windows_of(model.graph)


def check_graph(model: Any, path: Path, geometry: Geometry) -> None:
    """`check_onnx` for a model that may still lack rows_begin and rows_end.

    Raises:
        ExportError: with what was found, what is needed and the next step.
    """
    shape = shape_of(model)
    _check_names(model, path, shape)
    _check_attention(model.graph, path, shape.num_layers)
    if mixing := sorted({node.op_type for node in model.graph.node} & set(_MIX_ROWS)):
        raise ExportError(
            f"{path} rounds the numbers of all rows by one scale ({mixing[0]}), so that drafts would change the text. "
            "Choose a file whose weights alone are quantised, such as model_q4.onnx or model.onnx."
        )
    found = (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_size, shape.logits_width)
    promised = (
        geometry.num_layers, geometry.num_heads, geometry.num_kv_heads, geometry.head_size, geometry.logits_width
    )  # fmt: skip
    pairs = list(zip(("layers", "heads", "kv heads", "head size", "logits"), found, promised, strict=True))
    # If the graph leaves a number open, the configuration's is used.
    if any(here not in (None, there) for _, here, there in pairs):
        raise ExportError(
            f"{path} has {', '.join(f'{here} {what}' for what, here, _ in pairs)}, where its configuration promises "
            f"{', '.join(f'{there} {what}' for what, _, there in pairs)}: they do not belong together."
        )
    if any(windows := windows_of(model.graph)):
        raise ExportError(f"{path} cannot be run: its layers have {SLIDING.format(windows=describe_windows(windows))}")
    if any(geometry.sliding_windows or ()):
        raise ExportError(
            f"{path} has no sliding windows, where its configuration promises "
            f"{describe_windows(geometry.sliding_windows or ())}: its text would be another one. Leave out "
            "--format onnx to have it run by OpenVINO."
        )


def windows_of(graph: Any) -> tuple[int, ...]:
    """The sliding window of each layer's GroupQueryAttention, in tokens; 0 for none."""
    nodes = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    return tuple(max(attribute_of(node, "local_window_size") or 0, 0) for node in nodes)


def _check_names(model: Any, path: Path, shape: OnnxShape) -> None:
    """Check that the inputs and outputs have the names and types of a bundle's model."""
    optional = {tensor.name for tensor in model.graph.initializer} | {"position_ids"}
    pasts, presents = _cache_names("past_key_values", shape.num_layers), _cache_names("present", shape.num_layers)
    inputs = {"input_ids", "attention_mask", *pasts}
    lacking = sorted((inputs - set(shape.inputs)) | ({"logits", *presents} - set(shape.outputs)))
    unknown = sorted(set(shape.inputs) - inputs - optional)
    if not shape.num_layers:
        lacking = ["past_key_values.0.key"]
    if lacking or unknown:
        what = f"has no {lacking[0]}" if lacking else f"wants an input {unknown[0]}, which Outrider does not know"
        raise ExportError(
            f"{path} {what}. A model takes input_ids, attention_mask, perhaps position_ids, and "
            "past_key_values.N.key and .value; it gives logits, present.N.key and .value, N from 0. " + EXPORT_IT
        )
    for value in (*model.graph.input, *model.graph.output):
        kind, expected = value.type.tensor_type.elem_type, INT64 if value.name in (*_INPUTS, *ROWS, EXTRA) else FLOAT
        if kind != expected and (value.name not in optional or value.name in _INPUTS):
            raise ExportError(
                f"{path} has {value.name} in {type_name(kind)}; Outrider runs models whose cache and logits are in "
                "float32, and whose ids are in int64. Choose another file of the "
                "model, such as model.onnx or model_q4.onnx."
            )
    given = {value.name: value for value in (*model.graph.input, *model.graph.output)}
    for name, rank in (("logits", 3), *((name, 4) for name in (*pasts, *presents))):
        if (found := len(given[name].type.tensor_type.shape.dim)) != rank:
            raise ExportError(f"{path} has {name} with {found} dimensions, not {rank}. {EXPORT_IT}")
    for name, axis in (("input_ids", 1), (pasts[0], 2)):
        if (fixed := dim_of(given[name], axis)) is not None:
            raise ExportError(f"{path} takes {name} of {fixed} tokens only, where any number has to do. {EXPORT_IT}")


def _check_attention(graph: Any, path: Path, num_layers: int) -> None:
    """Check that each layer's attention is one GroupQueryAttention from its past to its present."""
    reader = {name: node for node in graph.node for name in node.input if is_past(name)}
    for i in range(num_layers):
        past, present = ([f"{kind}.{i}.{half}" for half in _CACHE] for kind in ("past_key_values", "present"))
        node = reader.get(past[0])
        if node is None or node.op_type != "GroupQueryAttention":
            op = "nothing" if node is None else node.op_type
            raise ExportError(
                f"The attention in {path} is not GroupQueryAttention: layer {i}'s past keys go to {op}, and the cache "
                f"would be copied for every token. {EXPORT_IT}"
            )
        if list(node.input[3:5]) != past or list(node.output[1:3]) != present:
            raise ExportError(f"{path} does not take layer {i}'s cache from {past} to {present}. {EXPORT_IT}")


def _cache_names(kind: str, num_layers: int) -> list[str]:
    return [f"{kind}.{i}.{half}" for i in range(num_layers) for half in _CACHE]
