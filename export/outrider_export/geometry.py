"""A model's shape: read from its configuration, and checked against the written IR."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.bundle.manifest import Geometry
from outrider.errors import ExportError
from outrider_export.gguf_file import is_array

if TYPE_CHECKING:
    from pathlib import Path

    from outrider_export.gguf_file import GGUFHeader


def geometry_of_config(config: dict[str, Any], where: Path) -> Geometry:
    """From a checkpoint's `config.json`.

    Raises:
        ExportError: naming the key that is missing.
    """
    try:
        heads = config["num_attention_heads"]
        return Geometry(
            architecture=config["model_type"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            hidden_size=config["hidden_size"],
            context_length=config["max_position_embeddings"],
            logits_width=config["vocab_size"],
        )
    except KeyError as error:
        raise ExportError(f"{where}/config.json has no {error}, so its model's shape is not known.") from error


def geometry_of_genai(config: dict[str, Any], where: Path) -> Geometry:
    """From the `genai_config.json` of a model for onnxruntime-genai.

    Raises:
        ExportError: naming the key that is missing.
    """
    try:
        model = config["model"]
        decoder = model["decoder"]
        return Geometry(
            architecture=model["type"],
            num_layers=decoder["num_hidden_layers"],
            num_heads=decoder["num_attention_heads"],
            num_kv_heads=decoder["num_key_value_heads"],
            head_size=decoder["head_size"],
            hidden_size=decoder["hidden_size"],
            context_length=model["context_length"],
            logits_width=model["vocab_size"],
        )
    except (KeyError, TypeError) as error:
        raise ExportError(f"{where}/genai_config.json has no {error}, so its model's shape is not known.") from error


def geometry_of_gguf(header: GGUFHeader) -> Geometry:
    """From a GGUF file's metadata.

    Raises:
        ExportError: naming the key or tensor that is missing, or what differs from layer to layer.
    """

    def of(key: str, default: int | None = None) -> int:
        return header.integer(header.of_architecture(key), default, least=1)

    for key in ("attention.head_count", "attention.head_count_kv"):
        if is_array(header.metadata.get(header.of_architecture(key))):
            raise ExportError(f"{header.path} has layers with different numbers of heads, which is not supported yet.")
    heads, hidden = of("attention.head_count"), of("embedding_length")
    matrix = header.tensors.get("output.weight") or header.tensors.get("token_embd.weight")
    if matrix is None or len(matrix.shape) != 2:
        raise ExportError(f"{header.path} has no token_embd.weight, so it is not a language model.")
    return Geometry(
        architecture=header.architecture,
        num_layers=of("block_count"),
        num_heads=heads,
        num_kv_heads=of("attention.head_count_kv", heads),
        head_size=of("attention.key_length", hidden // heads),
        hidden_size=hidden,
        context_length=of("context_length"),
        logits_width=matrix.shape[0],
    )


def check_ir(path: Path, geometry: Geometry) -> None:
    """Check that the IR at `path` can be read and has its source's shape.

    Raises:
        ExportError: with the differences.
    """
    import openvino

    try:
        model = openvino.Core().read_model(path)
    except RuntimeError as error:
        raise ExportError(f"The converted model cannot be read back: {' '.join(str(error).split())[:300]}") from error
    logits = model.output("logits").get_partial_shape()[-1]
    states = [node.get_output_partial_shape(0) for node in model.get_ops() if node.get_type_name() == "ReadValue"]
    heads = {(str(shape[1]), str(shape[3])) for shape in states if shape.rank.get_length() == 4}
    found = f"{logits} logits, {len(states)} cache tensors, (heads, head size) {sorted(heads)}"
    cache = [(str(geometry.num_kv_heads), str(geometry.head_size))]
    promised = f"{geometry.logits_width} logits, {2 * geometry.num_layers} cache tensors, (heads, head size) {cache}"
    if found != promised:
        raise ExportError(
            f"The converted model has {found}, where its configuration promises {promised}: Outrider does not run "
            "such a model."
        )
