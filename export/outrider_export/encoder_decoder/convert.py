"""Child process: the checkpoint folder of an encoder-decoder model to three graphs in OpenVINO IR, through torch.

Job: as for `outrider_export.with_torch.convert`, with `kind`, "t5", "whisper" or "marian"; `output`, the folder for
the decoder and its cross-attention; and `encoder`, the folder for the encoder, or None if another model's is the same.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from outrider.bundle.manifest import CROSS_NAME, Geometry
from outrider.system.core import new_core
from outrider_export.describe.encoder_decoder import KINDS
from outrider_export.encoder_decoder.graphs import cross_model, decoder_model, encoder_model
from outrider_export.progress import Progress
from outrider_export.with_torch.convert import export_ir, lift, load, save_weights

MODEL = "openvino_model.xml"
_SPARE_POSITIONS = 64  # after the model's context, for the padding of calls


def convert(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Convert the model that `job` describes. All files are written when this returns."""

    output, scratch = Path(job["output"]), Path(job["scratch"])
    scratch.mkdir(parents=True, exist_ok=True)
    geometry = msgspec.convert(job["geometry"], Geometry)
    progress.phase("read")
    model = _load_model(job)
    tied = bool(model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    progress.phase("convert")
    task = KINDS[job["kind"]]["task"]
    if job["kind"] == "marian":  # which optimum-intel 2.2 exports with Transformers 4.57 and older only
        lift(job["kind"], task)
    export_ir(model, scratch / "ir", task)
    del model
    core = new_core()
    first, later, encoder = (
        core.read_model(scratch / "ir" / f"openvino_{name}_model.xml")
        for name in ("decoder", "decoder_with_past", "encoder")
    )
    made = {
        output / MODEL: decoder_model(later, geometry),
        output / CROSS_NAME: cross_model(first, geometry.num_layers),
    }
    if job["encoder"] is not None:
        made[Path(job["encoder"]) / MODEL] = encoder_model(encoder)
    progress.phase("compress")
    for path, graph in made.items():
        # A part of a graph shares nodes with the rest of it, which NNCF would follow. A copy has none but its own.
        save_weights(graph.clone(), path, job["weights"])
    del first, later, encoder, made
    shutil.rmtree(scratch / "ir", ignore_errors=True)
    return {"tied_embeddings": tied}


def _load_model(job: dict[str, Any]) -> Any:
    """The torch model, in float32."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    loader = AutoModelForSpeechSeq2Seq if job["kind"] == "whisper" else AutoModelForSeq2SeqLM
    # Tracing fails on half precision, and fp16 is written by `save_weights`.
    model = load(loader, job["model"], dtype=torch.float32, trust_remote_code=job["trust_remote_code"])
    if job["kind"] != "t5":  # its positions are a table, which padding may read beyond
        table = model.model.decoder.embed_positions
        last = table.weight.data[-1:].repeat(_SPARE_POSITIONS, 1)
        table.weight = torch.nn.Parameter(torch.cat([table.weight.data, last]))
    return model
