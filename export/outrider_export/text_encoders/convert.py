"""Child process: an embedding model or a reranker to OpenVINO IR, through torch, compared with torch before its weights
are compressed.

Job: `model`, the checkpoint folder; `kind`, "embedding" or "rerank"; `weights`; `output`, the folder for
openvino_model; `scratch`, a folder for the uncompressed IR; `trust_remote_code`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import ExportError
from outrider.system.core import new_core
from outrider_export.progress import Progress
from outrider_export.with_torch.convert import export_ir, load, save_weights

_TASKS = {"embedding": "feature-extraction", "rerank": "text-classification"}
_OUTPUTS = {"embedding": "last_hidden_state", "rerank": "logits"}
_MOST_ERROR = 1e-2  # of the largest number
_NUM_TOKENS = 12


def convert(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Convert the model that `job` describes. All files are written when this returns."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    output, scratch, kind = Path(job["output"]), Path(job["scratch"]), job["kind"]
    scratch.mkdir(parents=True, exist_ok=True)
    progress.phase("read")
    loader = AutoModel if kind == "embedding" else AutoModelForSequenceClassification
    model = load(loader, job["model"], dtype="float32", trust_remote_code=job["trust_remote_code"])
    progress.phase("convert")
    export_ir(model, scratch / "ir", _TASKS[kind])
    made = new_core().read_model(scratch / "ir" / "openvino_model.xml")
    progress.phase("compare")
    _compare(model.eval(), made, _OUTPUTS[kind])
    del model
    progress.phase("compress")
    save_weights(made, output / "openvino_model.xml", job["weights"])
    del made
    shutil.rmtree(scratch / "ir", ignore_errors=True)
    return {}


def _compare(model: Any, made: Any, output: str) -> None:
    """Raise ExportError unless the graph has the output of its kind, with the numbers of the torch model."""
    import torch

    if output not in {name for port in made.outputs for name in port.get_names()}:
        raise ExportError(f"The converted model has no output {output}, which openvino-genai's pipeline reads.")
    token_ids = np.random.default_rng(0).integers(5, model.config.vocab_size, (1, _NUM_TOKENS))
    names = {name for port in made.inputs for name in port.get_names()}
    values = {"input_ids": token_ids, "attention_mask": np.ones_like(token_ids)}
    values |= {"token_type_ids": np.zeros_like(token_ids), "position_ids": np.arange(_NUM_TOKENS)[None]}
    hints = {"INFERENCE_PRECISION_HINT": "f32"}
    request = new_core().compile_model(made, "CPU", hints).create_infer_request()
    found = request.infer({name: value for name, value in values.items() if name in names})[output]
    with torch.no_grad():
        expected = getattr(model(input_ids=torch.tensor(token_ids)), output).numpy()
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not error < _MOST_ERROR:
        raise ExportError(
            f"The converted model's {output} differs from Transformers' by {error:.2g} of the largest number: this "
            "architecture is not converted correctly, and is refused."
        )
