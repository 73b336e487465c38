"""Checks that a model in ONNX fits into a bundle and matches its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.bundle.manifest import Geometry
from outrider.errors import ExportError
from outrider.models.backends.attention import SLIDING, describe_windows
from outrider_export.onnx.files import data_files, load
from outrider_export.onnx.graph import EXPORT_IT, FLOAT, INT64, attribute_of, dim_of, is_past, type_name

_IDS = ("input_ids", "attention_mask", "position_ids")
# They use one scale for all rows.
_MIX_ROWS = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul")


def check_onnx(path: Path, geometry: Geometry) -> tuple[int, ...]:
    """Check that the model at `path` fits into a bundle, with its weights, and has its source's shape.

    Returns the sliding window of each layer, 0 for none.

    Raises:
        ExportError: with what was found, what is needed and the next step.
    """
    model = load(path)
    check_graph(model.graph, path, geometry)
    data_files(model, path.parent)
    return (0,) * geometry.num_layers


def check_graph(graph: Any, path: Path, geometry: Geometry) -> None:
    """`check_onnx` without weights."""
    num_layers = max(sum(is_past(value.name) for value in graph.input) // 2, 1)
    parts = [f"{i}.{half}" for i in range(num_layers) for half in ("key", "value")]
    pasts, presents = ([f"{kind}.{part}" for part in parts] for kind in ("past_key_values", "present"))
    _check_names(graph, path, pasts, presents)
    _check_values(graph, path, pasts, presents)
    nodes = [_attention_of(graph, path, pasts[i : i + 2], presents[i : i + 2]) for i in range(0, len(parts), 2)]
    if mixing := sorted({node.op_type for node in graph.node} & set(_MIX_ROWS)):
        raise ExportError(
            f"{path} rounds the numbers of all rows by one scale ({mixing[0]}), so that drafts would change the text. "
            "Choose a file whose weights alone are quantised, such as model_q4.onnx or model.onnx."
        )
    _check_shape(graph, path, nodes, geometry)
    windows = [max(attribute_of(node, "local_window_size") or 0, 0) for node in nodes]
    if any(windows):
        raise ExportError(f"{path} cannot be run: its layers have {SLIDING.format(windows=describe_windows(windows))}")
    if any(geometry.sliding_windows or ()):
        raise ExportError(
            f"{path} has no sliding windows, where its configuration promises "
            f"{describe_windows(geometry.sliding_windows or ())}: its text would be another one. Leave out "
            "--format onnx to have it run by OpenVINO."
        )


def _check_names(graph: Any, path: Path, pasts: list[str], presents: list[str]) -> None:
    """Check that the inputs and outputs have the names of a bundle's model."""
    needed = {"input_ids", "attention_mask", *pasts}
    inputs, outputs = ({value.name for value in values} for values in (graph.input, graph.output))
    lacking = sorted((needed - inputs) | ({"logits", *presents} - outputs))
    unknown = sorted(inputs - needed - {"position_ids"} - {tensor.name for tensor in graph.initializer})
    if lacking or unknown:
        what = f"has no {lacking[0]}" if lacking else f"wants an input {unknown[0]}, which Outrider does not know"
        raise ExportError(
            f"{path} {what}. A model takes input_ids, attention_mask, perhaps position_ids, and "
            "past_key_values.N.key and .value; it gives logits, present.N.key and .value, N from 0. " + EXPORT_IT
        )


def _check_values(graph: Any, path: Path, pasts: list[str], presents: list[str]) -> None:
    """Check the types and dimensions of inputs and outputs."""
    ranks = {"logits": 3, **dict.fromkeys((*pasts, *presents), 4)}  # of those in float32
    lengths = {"input_ids": 1, **dict.fromkeys(pasts, 2)}  # the axis of their tokens
    for value in (*graph.input, *graph.output):
        kind, rank = value.type.tensor_type.elem_type, ranks.get(value.name)
        if (value.name in ranks and kind != FLOAT) or (value.name in _IDS and kind != INT64):
            raise ExportError(
                f"{path} has {value.name} in {type_name(kind)}; Outrider runs models whose cache and logits are in "
                "float32, and whose ids are in int64. Choose another file of the "
                "model, such as model.onnx or model_q4.onnx."
            )
        found = len(value.type.tensor_type.shape.dim)
        if rank not in (None, found):
            raise ExportError(f"{path} has {value.name} with {found} dimensions, not {rank}. {EXPORT_IT}")
        if value.name in lengths and (fixed := dim_of(value, lengths[value.name])) is not None:
            raise ExportError(
                f"{path} takes {value.name} of {fixed} tokens only, where any number has to do. {EXPORT_IT}"
            )


def _attention_of(graph: Any, path: Path, pasts: list[str], presents: list[str]) -> Any:
    """A layer's attention: one GroupQueryAttention from its past to its present."""
    node = next((node for node in graph.node if pasts[0] in node.input), None)
    if node is None or node.op_type != "GroupQueryAttention":
        op = "nothing" if node is None else node.op_type
        raise ExportError(
            f"The attention in {path} is not GroupQueryAttention: {pasts[0]} goes to {op}, and the cache would be "
            f"copied for every token. {EXPORT_IT}"
        )
    if list(node.input[3:5]) != pasts or list(node.output[1:3]) != presents:
        raise ExportError(f"{path} does not take a layer's cache from {pasts} to {presents}. {EXPORT_IT}")
    return node


def _check_shape(graph: Any, path: Path, nodes: list[Any], geometry: Geometry) -> None:
    """Check the numbers of the graph against those of its configuration."""
    given = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    promised = (
        geometry.num_layers, geometry.num_heads, geometry.num_kv_heads, geometry.head_size, geometry.logits_width
    )  # fmt: skip
    names = ("layers", "heads", "kv heads", "head size", "logits")
    for node in nodes:
        heads, kv_heads = (attribute_of(node, name) for name in ("num_heads", "kv_num_heads"))
        attended = dim_of(given.get(node.output[0]), 2)
        # The cache's head size is open in files of onnxruntime-genai.
        size = dim_of(given[node.input[3]], 3) or (attended and heads and attended // heads)
        found = (len(nodes), heads, kv_heads, size, dim_of(given["logits"], 2))
        if found != promised:
            here, there = (
                ", ".join(f"{each or 'any'} {what}" for each, what in zip(numbers, names, strict=True))
                for numbers in (found, promised)
            )
            raise ExportError(
                f"{path} has {here}, where its configuration promises {there}: they do not belong together. {EXPORT_IT}"
            )
