"""Child process: a checkpoint folder or a GGUF file to ONNX, by onnxruntime-genai's model builder.

Job: as that of `convert`, with `weights` one of int8, int4 and fp32, and `geometry`, for the graph's
shapes; `output` gets model.onnx and model.onnx.data.

int8 is 8 bits, symmetric, in blocks of 64 with a float32 scale each (MatMulNBits); activations are rounded to 8
bits, too, row by row (accuracy level 4), for which processors have instructions. int4 is 4 bits, asymmetric, in
blocks of 32, with the output matrix in 8. The embedding has 8 bits in both. Tied
embeddings are stored once.

In 8 bits, blocks of 64 instead of 32 read a tenth less. A row still has the same bits alone and with others, so plain
decoding needs no second row. With blocks of 128 it does, and narrow models lose too much: in
SmolLM2-135M the median cosine of the logits with the float32 model's is 0.9989, against 0.9993 with 64.

Of Qwen2.5-Coder-0.5B in 4 bits, the logits' mean KL divergence from the torch model on a page of text is 0.073
symmetric, 0.046 asymmetric, at the same speed; 0.048 with the builder's k_quant, which takes fifteen times as long.
"""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outrider.bundle.manifest import Geometry
from outrider.errors import ExportError, one_line
from outrider.models.backends.attention import SLIDING, describe_windows
from outrider_export.architectures import ARCHITECTURES, describe_layers
from outrider_export.comparison import Comparison
from outrider_export.convert import load_model
from outrider_export.gguf_file import read_header
from outrider_export.gguf_tokenizer import write_tokenizer
from outrider_export.onnx_files import MODEL, Weights, load
from outrider_export.onnx_inputs import add_extra_rows, add_rows, write_shape
from outrider_export.onnx_matrices import compress_embedding, share_embedding
from outrider_export.progress import Progress
from outrider_export.tokenizer_job import add_tokenizer

_ROUNDED = "accuracy_level=4"
_OPTIONS = {
    "int8": ("is_symmetric=true", "block_size=64", _ROUNDED),
    "int4": ("is_symmetric=false", "block_size=32", "matmul_mixed_precision=last_matmul:int8", _ROUNDED),
    "fp32": (),
}
# The builder shares the embedding as a transposed copy in memory, or in 4 bits. So onnx_matrices shares it instead.
_UNSHARED = "shared_embeddings=false"
_OPENVINO = "Leave out --format onnx to have it run by OpenVINO."


def convert(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Convert the model that `job` describes. All files are written when this returns."""
    output, scratch = Path(job["output"]), Path(job["scratch"])
    scratch.mkdir(parents=True, exist_ok=True)
    progress.phase("read")
    model = load_model(job)
    config = model.config
    layers = describe_layers(config)
    if any(layers["sliding_windows"]):
        said = SLIDING.format(windows=describe_windows(layers["sliding_windows"]))
        raise ExportError(f"Models of architecture '{config.model_type}' have {said}")
    known = ARCHITECTURES.get(config.model_type)
    comparison = None if known and known.onnx else Comparison(model)
    folder = _describe(job, model, scratch / "checkpoint") if job["gguf"] else Path(job["model"])
    progress.phase("convert")
    _build(model, folder, scratch / "built", job)
    del model
    gc.collect()  # the builder leaves the model in reference cycles
    progress.phase("write")
    weights = Weights(load(scratch / "built" / "model.onnx"), scratch / "built")
    _check_rope(weights, config)
    tied = share_embedding(weights) if job["weights"] == "fp32" else compress_embedding(weights)
    write_shape(weights.model, msgspec.convert(job["geometry"], Geometry))
    add_rows(weights.model)
    add_extra_rows(weights.model)
    weights.save(output)
    if comparison is not None:
        progress.phase("compare")
        comparison.check_onnx(output / MODEL, job["weights"])
    if "tokenizer" in job:
        progress.phase("tokenizer")
        add_tokenizer(job)
    return {"tied_embeddings": tied, "layers": layers}


def _describe(job: dict[str, Any], model: Any, folder: Path) -> Path:
    """Write the configuration and the tokenizer of a GGUF file to a folder, for the builder."""
    write_tokenizer(read_header(Path(job["model"])), folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


def _build(model: Any, folder: Path, output: Path, job: dict[str, Any]) -> None:
    """Run the model builder, which is a script, on a loaded model. folder: its configuration and tokenizer.

    Raises:
        ExportError: with the builder's message, if it does not support the architecture or the configuration.
    """
    from transformers import AutoModelForCausalLM

    remote = f"hf_remote={str(job['trust_remote_code']).lower()}"
    options = (*_OPTIONS[job["weights"]], _UNSHARED, "hf_token=false", remote)
    folders = ("-i", str(folder), "-o", str(output), "-c", str(output.parent / "cache"))
    sys.argv = ["builder", *folders, "-p", job["weights"], "-e", "cpu", "--extra_options", *options]
    # The builder's own loading would read pickles, and a GGUF file only after it was written as a checkpoint.
    AutoModelForCausalLM.from_pretrained = lambda *_, **__: model
    try:
        runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
    except OSError:
        raise
    except Exception as error:
        said = one_line(error).replace(str(folder), type(model).__name__)
        if str(error) and not isinstance(error, NotImplementedError):
            said = f"{type(error).__name__}: {said}"
        raise ExportError(f"onnxruntime-genai's model builder says: {said}. {_OPENVINO}") from error


def _check_rope(weights: Weights, config: Any) -> None:
    """Check that the builder scaled positions as configured: it silently ignores some kinds of scaling.

    Raises:
        ExportError: with the kind.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind == "default":
        return
    problem = f"onnxruntime-genai's model builder does not scale positions as this model does (RoPE: {kind})."
    if kind not in ROPE_INIT_FUNCTIONS or "cos_cache" not in weights:
        raise ExportError(f"{problem} {_OPENVINO}")
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    found = weights.read("cos_cache")
    positions = np.array([0, 1, 2, len(found) // 2, len(found) - 1])
    angles = positions[:, None] * frequencies.double().numpy()
    if found.shape[1] != len(frequencies) or np.abs(found[positions] - np.cos(angles) * scale).max() > 1e-2:
        raise ExportError(f"{problem} {_OPENVINO}")


if __name__ == "__main__":
    from outrider_export.child import serve

    serve(convert)
