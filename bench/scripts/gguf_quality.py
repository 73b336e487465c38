"""Measures how far the forms that an export makes of a GGUF file are from the file: bytes and KL divergence.

    python bench/scripts/gguf_quality.py MODEL.gguf [--forms onnx/int4,openvino/int8] [--tokens 400] [--text FILE …]

Each form reads the same text, and its next-token distributions are compared with those of the file's own weights: mean
KL divergence in nats, and the share of tokens whose likeliest successor is the same. The file's weights are dequantised
to float16, and calculated in float32. "rounded again" is int4 without the file's codes: as of a checkpoint in 16 bits.
"draft" is the form of a draft model, in which matrices that the file has in more bits than most have 4, too.
Speed is not measured: export a form, and run `outrider bench` on an idle machine. The last line is JSON.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime
import openvino as ov
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outrider_export.direct import onnx_pack, pack
from outrider_export.direct.convert import convert, open_weights
from outrider_export.direct.own_codes import OwnForm
from outrider_export.progress import Silent
from outrider_export.sources.gguf_reader import read_header
from outrider_export.tokenizers.gguf_tokenizer import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [ROOT / "docs" / "architecture.md", ROOT / "runtime" / "outrider" / "decoding" / "loop.py"]
AGAIN, DRAFT = "rounded again", "draft"
INT4 = ("int4", f"int4/{DRAFT}", f"int4/{AGAIN}")
FORMS = [f"{library}/{weights}" for library in ("openvino", "onnx") for weights in ("int8", *INT4)]
CONTEXT = 4096


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--tokens", type=int, default=400, help="of all texts")
    parser.add_argument("--text", type=Path, nargs="+", default=TEXTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        texts = read_texts(arguments.model, arguments.text, arguments.tokens, Path(scratch))
        _, wanted = measure(arguments.model, "openvino/fp16", texts, Path(scratch))
        rows = []
        print(f"| form of {arguments.model.name} | MB | KL divergence | same likeliest token |\n|---|---|---|---|")
        for form in arguments.forms.split(","):
            size, found = measure(arguments.model, form, texts, Path(scratch))
            lost, same = compare(wanted, found)
            rows.append({"form": form, "bytes": size, "kl": lost, "same": same})
            print(f"| {form} | {size / 1e6:,.0f} | {lost:.4f} | {same:.1%} |", flush=True)
    print(json.dumps({"model": arguments.model.name, "tokens": sum(map(len, texts)), "forms": rows}))


def read_texts(model: Path, files: list[Path], count: int, scratch: Path) -> list[list[int]]:
    """The first tokens of each text, with the model's tokenizer."""
    write_tokenizer(read_header(model), scratch / "tokenizer")
    tokenizer = Tokenizer.from_file(str(scratch / "tokenizer" / "tokenizer.json"))
    return [tokenizer.encode(file.read_text(encoding="utf-8")).ids[: count // len(files)] for file in files]


def measure(model: Path, form: str, texts: list[list[int]], scratch: Path) -> tuple[int, list[NDArray[np.float32]]]:
    """The bytes of a form's weights and graph, and its logits float32 [tokens, width] for each text."""
    library, weights, *kind = form.split("/")
    folder = scratch / "model"
    job: dict[str, Any] = {
        "model": str(model), "gguf": True, "format": library, "weights": weights, "output": str(folder),
        "geometry": {"context_length": CONTEXT}, "is_draft": DRAFT in kind,
    }  # fmt: skip
    forms = patch.multiple(pack, forms_of=_no_codes), patch.multiple(onnx_pack, forms_of=_no_codes)
    try:
        if AGAIN in kind:
            with forms[0], forms[1]:
                convert(job, Silent())
        else:
            convert(job, Silent())
        size = sum(file.stat().st_size for file in folder.iterdir())
        logits = (_logits_in_onnx if library == "onnx" else _logits_in_openvino)(folder, model, texts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return size, logits


def _no_codes(matrices: Mapping[str, Any], **_: bool) -> dict[str, OwnForm]:
    return dict.fromkeys(matrices, OwnForm())


def _logits_in_openvino(folder: Path, model: Path, texts: list[list[int]]) -> list[NDArray[np.float32]]:
    config = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    compiled = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", config)
    made = []
    for token_ids in texts:
        count = len(token_ids)
        inputs = {
            "input_ids": np.array([token_ids]), "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count)[None], "beam_idx": np.zeros(1, np.int32),
        }  # fmt: skip
        made.append(compiled.create_infer_request().infer(inputs)["logits"][0].copy())
    return made


def _logits_in_onnx(folder: Path, model: Path, texts: list[list[int]]) -> list[NDArray[np.float32]]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    decoder, made = open_weights(model, is_gguf=True).decoder, []
    empty = np.zeros((1, decoder.sizes.num_kv_heads, 0, decoder.sizes.head_size), np.float32)
    for token_ids in texts:
        inputs = {port.name: empty for port in session.get_inputs() if port.name.startswith("past_key_values")}
        inputs |= {"input_ids": np.array([token_ids]), "attention_mask": np.ones((1, len(token_ids)), np.int64)}
        made.append(session.run(["logits"], inputs)[0][0])
    return made


def compare(wanted: list[NDArray[np.float32]], found: list[NDArray[np.float32]]) -> tuple[float, float]:
    """The mean KL divergence in nats, and the share of rows with the same likeliest token."""
    lost, same = [], []
    for a, b in zip(wanted, found, strict=True):
        for theirs, ours in zip(a, b, strict=True):
            p, q = (_logarithms(each.astype(np.float64)) for each in (theirs, ours))
            lost.append(float(np.exp(p) @ (p - q)))
            same.append(theirs.argmax() == ours.argmax())
    return float(np.mean(lost)), float(np.mean(same))


def _logarithms(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    logits = logits - logits.max()
    result: NDArray[np.float64] = logits - np.log(np.exp(logits).sum())
    return result


if __name__ == "__main__":
    main()
