"""A model's shape: read from its configuration, and checked against the written IR."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from outrider.bundle.architectures import refusal_of
from outrider.bundle.manifest import Geometry
from outrider.errors import BundleError, ExportError
from outrider.models.backends.attention import describe_windows, windows_of
from outrider.system.core import new_core
from outrider_export.direct.arch import NotDirect
from outrider_export.direct.archs import ARCHS
from outrider_export.direct.gguf_config import kv_heads_of
from outrider_export.direct.sizes import block_kinds
from outrider_export.sources.gguf_file import GGUFHeader, is_array
from outrider_export.sources.source import configuring

# Names of the same numbers in config.json, the commonest first.
_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "hidden_size": ("hidden_size", "n_embd", "n_embed"),
    "context_length": ("max_position_embeddings", "n_positions"),
}
# Where config.json has no length: what they were trained with.
_TRAINED_LENGTHS = {"bloom": 2048, "falcon": 2048}


def geometry_of_config(config: dict[str, Any], where: Path) -> Geometry:
    """From a checkpoint's `config.json`.

    Raises:
        ExportError: for an architecture that does not run, or naming the key that is missing.
    """
    check_architecture(config, where)
    found: dict[str, Any] = {
        ours: next((config[key] for key in keys if config.get(key)), None) for ours, keys in _NAMES.items()
    }
    try:
        architecture, logits_width = config["model_type"], config["vocab_size"]
    except KeyError as error:
        raise ExportError(f"{where}/config.json has no {error}, so its model's shape is not known.") from error
    found["num_layers"] = found["num_layers"] or len(block_kinds(config)) or None
    found["context_length"] = found["context_length"] or _TRAINED_LENGTHS.get(architecture)
    if lacking := [_NAMES[ours][0] for ours, value in found.items() if value is None]:
        raise ExportError(f"{where}/config.json has no '{lacking[0]}', so its model's shape is not known.")
    heads = found["num_heads"]
    with configuring(where / "config.json"):
        found |= {
            "architecture": architecture,
            "num_kv_heads": _num_kv_heads(config, heads),
            "head_size": config.get("head_dim") or found["hidden_size"] // heads,
            "logits_width": logits_width,
        }
        return msgspec.convert(found, Geometry)


def _num_kv_heads(config: dict[str, Any], num_heads: int) -> int:
    """Heads of keys and values: of StarCoder and Falcon, one unless they say otherwise."""
    if config.get("new_decoder_architecture"):
        return int(config.get("num_kv_heads") or num_heads)
    if config.get("multi_query"):
        return 1
    return int(config.get("num_key_value_heads") or num_heads)


def check_architecture(config: dict[str, Any], where: Path) -> None:
    """Check that nothing is known against the architecture of a `config.json`.

    Raises:
        ExportError: with the architecture, the rule and the next step.
    """
    layers = config.get("layer_types")
    kinds = [*map(str, layers)] if isinstance(layers, list) else block_kinds(config)
    if refusal := refusal_of(str(config.get("model_type")), kinds):
        raise ExportError(f"{where} cannot be exported. {refusal}")
    size, of_full = (config.get(name) for name in ("head_dim", "global_head_dim"))
    is_known = any(form.varied for form in (ARCHS.get(str(config.get("model_type"))),) if form)
    if of_full and of_full != size and not is_known:
        raise ExportError(
            f"{where} cannot be exported: its layers have heads of {size} and of {of_full} numbers (architecture "
            f"'{config.get('model_type')}'), and Outrider runs models whose layers are alike. Choose a model of "
            "docs/models.md."
        )


def geometry_of_genai(config: dict[str, Any], where: Path) -> Geometry:
    """From the `genai_config.json` of a model for onnxruntime-genai.

    Raises:
        ExportError: naming the key that is missing.
    """
    try:
        model = config["model"]
        decoder = model["decoder"]
        found = {
            "architecture": model["type"],
            "num_layers": decoder["num_hidden_layers"],
            "num_heads": decoder["num_attention_heads"],
            "num_kv_heads": decoder["num_key_value_heads"],
            "head_size": decoder["head_size"],
            "hidden_size": decoder["hidden_size"],
            "context_length": model["context_length"],
            "logits_width": model["vocab_size"],
        }
    except (KeyError, TypeError) as error:
        raise ExportError(f"{where}/genai_config.json has no {error}, so its model's shape is not known.") from error
    with configuring(where / "genai_config.json"):
        return msgspec.convert(found, Geometry)


def geometry_of_gguf(header: GGUFHeader) -> Geometry:
    """From a GGUF file's metadata.

    Raises:
        ExportError: for an architecture that does not run, or naming the key or tensor that is missing, or what differs
            from layer to layer.
    """

    def of(key: str, default: int | None = None) -> int:
        return header.integer(f".{key}", default, least=1)

    if refusal := refusal_of(header.architecture):
        raise ExportError(f"{header.path} cannot be exported. {refusal}")
    try:
        by_layer = kv_heads_of(header)
    except NotDirect:
        by_layer = {"num_key_value_heads": 0}
    kv_heads, head_size = (by_layer.get(key) for key in ("num_key_value_heads", "head_dim"))
    if kv_heads == 0 or is_array(header.value(".attention.head_count")):
        raise ExportError(f"{header.path} has layers with different numbers of heads, which is not supported yet.")
    heads, hidden = of("attention.head_count"), of("embedding_length")
    matrix = header.tensors.get("output.weight") or header.tensors.get("token_embd.weight")
    if matrix is None or len(matrix.shape) != 2:
        raise ExportError(f"{header.path} has no token_embd.weight, so it is not a language model.")
    return Geometry(
        architecture=header.architecture,
        num_layers=header.num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads or of("attention.head_count_kv", heads),
        head_size=head_size or of("attention.key_length", hidden // heads),
        hidden_size=hidden,
        context_length=of("context_length"),
        logits_width=matrix.shape[0],
    )


def _said(logits: Any, shapes: list[tuple[str, str]]) -> str:
    """What a graph has, in words. shapes: of its cache tensors."""
    counts = [f"{count} of {shape}" for shape, count in sorted(Counter(shapes).items())]
    of_each = sorted({*shapes}) if len(counts) == 1 else ", ".join(counts)
    return f"{logits} logits, {len(shapes)} cache tensors, (heads, head size) {of_each}"


def check_ir(path: Path, geometry: Geometry) -> tuple[int, ...]:
    """Check that the IR at `path` can be read, and has its source's shape with a paged cache, too.

    Returns the sliding window of each layer, which are those of `geometry` if these are known.

    Raises:
        ExportError: with the differences.
    """

    from outrider.models.backends.paged_graph import to_paged_attention

    try:
        model = new_core().read_model(path)
    except RuntimeError as error:
        raise ExportError(f"The converted model cannot be read back: {' '.join(str(error).split())[:300]}") from error
    logits = model.output("logits").get_partial_shape()[-1]
    states = [node.get_output_partial_shape(0) for node in model.get_ops() if node.get_type_name() == "ReadValue"]
    caches = [shape for shape in states if shape.rank.get_length() == 4 and shape[2].is_dynamic]
    found = _said(logits, [(str(shape[1]), str(shape[3])) for shape in caches])
    of_values = [(heads, geometry.value_size or size) for heads, size in geometry.cache_shapes]
    shapes = [(str(heads), str(size)) for heads, size in (*geometry.cache_shapes, *of_values)]
    promised = _said(geometry.logits_width, shapes)
    try:
        to_paged_attention(model)
    except BundleError as error:
        raise ExportError(f"The architecture '{geometry.architecture}' is not supported. {error}") from error
    if found != promised:
        raise ExportError(
            f"The converted model has {found}, where its configuration promises {promised}: Outrider does not run "
            "such a model."
        )
    windows = windows_of(model)
    if geometry.sliding_windows not in (None, windows):
        raise ExportError(
            f"The layers of architecture '{geometry.architecture}' have sliding windows of "
            f"{describe_windows(geometry.sliding_windows or ())}, and with OpenVINO's paged attention "
            f"{describe_windows(windows)}, so that its text would be another one. Choose a model of docs/models.md."
        )
    return windows
