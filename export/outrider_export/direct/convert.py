"""Child process: a GGUF file or a checkpoint folder of a Llama-like decoder to OpenVINO IR or ONNX, without PyTorch.

Job: `model`, the checkpoint folder or the GGUF file; `gguf`, whether it is one; `format` and `weights`; `geometry`;
`output`, the folder for openvino_model or model.onnx; `vision`, the folder for its encoder of images, if any, and
`layout`, of these; `adapter`, the folder of a LoRA adapter that is merged into it, if any; `proposed`, a file of the
tokens that it gets logits for, int32 [n];
`is_draft`, whether it is a draft model: it has to be fast, so int4 has nothing in 8 bits but the matrices of tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from outrider.bundle.manifest import PROPOSED_NAME
from outrider.errors import ExportError
from outrider.models.backends.attention import SLIDING, describe_windows
from outrider_export.direct.checkpoint_weights import CheckpointWeights
from outrider_export.direct.decoder import Decoder
from outrider_export.direct.describe import describe
from outrider_export.direct.gguf_config import decoder_of
from outrider_export.direct.graph import build
from outrider_export.direct.pack import matrices_of, pack
from outrider_export.direct.rope import axes_of
from outrider_export.direct.save import save
from outrider_export.direct.vision_encoder import write_encoder
from outrider_export.direct.weights import Weights
from outrider_export.onnx.files import MODEL, import_onnx
from outrider_export.onnx.inputs import add_extra_rows, add_rows
from outrider_export.progress import Progress
from outrider_export.sources.gguf_reader import read_header
from outrider_export.sources.peft_adapter import read_adapter
from outrider_export.sources.source import architectures_of, configuring, read_config, read_json, text_part

_ROTATED = 16  # ONNX Runtime's GroupQueryAttention rotates so many numbers of a head, or a multiple


def convert(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Convert the model that `job` describes. All files are written when this returns."""
    weights = open_weights(Path(job["model"]), job["gguf"])
    decoder = weights.decoder
    if job.get("adapter"):
        weights.merge(read_adapter(Path(job["adapter"])))
    output = Path(job["output"])
    output.mkdir(parents=True)
    limits = decoder.limits
    limit = limits.length or (limits.long_from if job["format"] == "onnx" else 0)
    if limit:
        section = "Llama 4" if limits.chunk else "LongRoPE"
        progress.note(f"Its context length is {limit:,}: see '{section}' in docs/models.md.")
    elif limits.long_from:
        progress.note(f"Texts of more than {limits.long_from:,} tokens are rotated otherwise: see docs/models.md.")
    whole = {} if job["gguf"] else read_json(Path(job["model"]) / "config.json")
    if job.get("vision") and job["layout"] == "qwen":
        with configuring(Path(job["model"]) / "config.json"):
            decoder = _in_grids(decoder, whole)
    elif not job.get("vision") and architectures_of(text_part(whole)) != architectures_of(whole):
        progress.note("Its text part is converted: the model reads images, and the bundle does not.")
    if job.get("proposed"):
        shutil.copyfile(job["proposed"], output / PROPOSED_NAME)
        weights.proposed = np.load(output / PROPOSED_NAME).astype(np.int64)
    matrices = matrices_of(weights)
    progress.phase("convert", sum(weights.matrix(name).num_bytes for name in matrices))
    if job["format"] == "onnx":
        _write_onnx(weights, job, output, progress)
    else:
        path, keep_finer = output / "openvino_model.bin", not job.get("is_draft")
        packed = pack(weights, job["weights"], path, progress.advance, keep_finer=keep_finer)
        progress.phase("write")
        save(*build(decoder, weights, packed), output / "openvino_model.xml")
    if job.get("vision"):
        write_encoder(Path(job["model"]), whole, job["layout"], Path(job["vision"]), job["weights"])
    layers = describe_layers(decoder) | ({"context_length": limit} if limit else {"long_from": limits.long_from})
    return {"tied_embeddings": weights.is_tied, "layers": layers}


def _in_grids(decoder: Decoder, whole: Mapping[str, Any]) -> Decoder:
    """The decoder with positions along three axes. whole: the checkpoint's configuration."""
    config = text_part({**whole})
    parameters = config.get("rope_parameters") or config["rope_scaling"]
    interleaved = str(whole["model_type"]).startswith("qwen3")
    ropes = {
        kind: replace(rope, axes=axes_of(parameters, len(rope.frequencies), interleaved=interleaved))
        for kind, rope in decoder.ropes.items()
    }
    return replace(decoder, ropes=ropes)


def _write_onnx(weights: Weights, job: dict[str, Any], output: Path, progress: Progress) -> None:
    """Write model.onnx and model.onnx.data."""
    from outrider_export.direct import onnx_graph, onnx_pack

    decoder = weights.decoder
    if any(decoder.windows):
        said = SLIDING.format(windows=describe_windows(decoder.windows))
        raise ExportError(f"Models of architecture '{decoder.arch.name}' have {said}")
    if decoder.rotary_size % _ROTATED:
        raise ExportError(
            f"Each head of this model rotates {decoder.rotary_size} numbers, ONNX Runtime a multiple of {_ROTATED}: "
            "leave out --format onnx to have it run by OpenVINO."
        )
    limit = decoder.limits.length or decoder.limits.long_from
    rotations = onnx_graph.rotations(decoder.ropes, limit or job["geometry"]["context_length"])
    path, keep_finer = output / f"{MODEL}.data", not job.get("is_draft")
    packed, others = onnx_pack.pack(weights, job["weights"], path, progress.advance, rotations, keep_finer=keep_finer)
    progress.phase("write")
    model = onnx_graph.build(decoder, weights, packed, others)
    add_rows(model)
    add_extra_rows(model)
    import_onnx().save(model, output / MODEL)


def open_weights(path: Path, is_gguf: bool) -> Weights:
    """The weights of a model, with what it computes.

    Raises:
        NotDirect: when it computes something that `graph` does not have.
        ExportError: when it is damaged.
    """
    if not is_gguf:
        return CheckpointWeights(path, describe(read_config(path)))
    from outrider_export.direct.gguf_weights import GGUFWeights

    header = read_header(path)
    return GGUFWeights(header, decoder_of(header))


def describe_layers(decoder: Decoder) -> dict[str, Any]:
    """The fields of `Geometry` that the configuration tells."""
    count, active = (decoder.experts.count, decoder.experts.active) if decoder.experts else (0, 0)
    found: dict[str, Any] = {
        "sliding_windows": decoder.windows, "num_experts": count, "num_active_experts": active,
    }  # fmt: skip
    found |= {"layer_states": decoder.states} if decoder.states else {}
    if decoder.blocks is not None:
        found |= {"num_layers": len(decoder.layers), "head_size": decoder.sizes.head_size}
    if decoder.latent is not None:
        sizes = decoder.layers[0].sizes
        found |= {"num_kv_heads": sizes.num_kv_heads, "head_size": sizes.head_size, "value_size": sizes.value_size}
    return found | ({"kv_shapes": decoder.kv_shapes} if decoder.kv_shapes else {})
