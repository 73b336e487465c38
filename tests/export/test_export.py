"""From checkpoints and GGUF files to bundles, through the real converters."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from transformers import AutoModelForCausalLM

import exports
from exports import logits_of_ir
from outrider.bundle import Bundle, Format, read_bundle
from outrider.errors import ExportError
from outrider_export import export_bundle
from outrider_export.describe.plan import default_weights, make_plan
from outrider_export.sources.gguf_reader import read_header
from outrider_export.sources.source import locate
from shapes import logits_of

pytestmark = pytest.mark.children

IDS = [*range(20, 52)]


def logits_in(bundle: Bundle, folder: str) -> Any:
    """float32 [tokens, logits width] of the stateful IR in `folder`."""
    return logits_of_ir(bundle.folder / folder / "openvino_model.xml", IDS)


def error_of(bundle: Bundle, folder: str, checkpoint: Path) -> float:
    """Largest difference in the logits, as a share of the largest logit."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return exports.error_of(logits_in(bundle, folder), logits_of(model, IDS))


def matrices(bundle: Bundle, folder: str, rows: int) -> dict[str, int]:
    """How many constants of at least `rows` rows the IR has, by element type."""
    found: dict[str, int] = {}
    for node in ov.Core().read_model(bundle.folder / folder / "openvino_model.xml").get_ops():
        if node.get_type_name() == "Constant" and len(node.shape) >= 2 and node.shape[0] == rows and node.shape[1] > 1:
            kind = node.get_element_type().get_type_name()
            found[kind] = found.get(kind, 0) + 1
    return found


@pytest.fixture(scope="module")
def exact(convert: Any, tied: Path, untied: Path) -> tuple[Bundle, Any]:
    """The bundle, and what was told on the way."""
    made: tuple[Bundle, Any] = convert(tied, untied, weights="fp32", draft_weights="fp16")
    return made


@pytest.fixture(scope="module")
def compressed(convert: Any, tied: Path, untied: Path) -> Bundle:
    made: Bundle = convert(tied, untied, draft_weights="int4")[0]
    return made


def test_fp32_and_fp16_are_the_torch_model(exact: tuple[Bundle, Any], tied: Path, untied: Path) -> None:
    assert error_of(exact[0], "main", tied) < 1e-5
    assert error_of(exact[0], "draft", untied) < 2e-3


def test_int8_and_int4_are_near_it(compressed: Bundle, tied: Path, untied: Path) -> None:
    assert 1e-5 < error_of(compressed, "main", tied) < 0.05
    assert 1e-3 < error_of(compressed, "draft", untied) < 0.5
    main, draft = compressed.manifest.main, compressed.manifest.drafters[0].model
    assert (main.weights, draft.weights) == ("int8", "int4")


def test_tied_embeddings_stay_tied(compressed: Bundle, exact: tuple[Bundle, Any]) -> None:
    assert matrices(compressed, "main", 448) == {"u8": 1}
    assert matrices(exact[0], "main", 448) == {"f32": 1}
    assert matrices(compressed, "draft", 512) == {"u8": 2}  # embedding and output matrix stay at 8 bits beside int4
    assert matrices(exact[0], "draft", 512) == {"f16": 2}
    assert compressed.manifest.main.source.recipe["tied_embeddings"] == "true"
    assert compressed.manifest.drafters[0].model.source.recipe["tied_embeddings"] == "false"


def test_int4_has_groups_of_64(compressed: Bundle) -> None:
    model = ov.Core().read_model(compressed.folder / "draft" / "openvino_model.xml")
    constants = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    packed = [
        node for node in constants if node.get_element_type() == ov.Type.u4 and node.shape[-1] > 1
    ]  # no zero points
    groups = {node.shape[-1] for node in packed}
    assert groups == {64}


def test_manifest_describes_the_pair(exact: tuple[Bundle, Any], tied: Path) -> None:
    bundle, _ = exact
    manifest = bundle.manifest
    main, draft = manifest.main, manifest.drafters[0].model
    assert (main.geometry.num_layers, main.geometry.num_kv_heads, main.geometry.head_size) == (2, 2, 16)
    assert (main.geometry.logits_width, draft.geometry.logits_width) == (448, 512)
    assert main.vocab_size == draft.vocab_size == 404
    assert main.vocab_sha256 == draft.vocab_sha256
    assert main.geometry.context_length == 512
    assert manifest.tokenizer.eos_token_ids == (400, 402)
    assert manifest.tokenizer.special_token_ids == (400, 401, 402)
    assert manifest.tokenizer.pad_token_id == 400
    assert manifest.tokenizer.chat_template
    assert (main.source.id, main.source.kind) == (tied.name, "folder")
    assert main.source.recipe["route"] == "checkpoint"
    assert str(tied.parent) not in (bundle.folder / "outrider.json").read_text(encoding="utf-8")
    read_bundle(bundle.folder).check_hashes()
    assert sorted(p.name for p in (bundle.folder / "main").iterdir()) == ["openvino_model.bin", "openvino_model.xml"]


def test_progress_tells_the_phases(exact: tuple[Bundle, Any]) -> None:
    bundle, progress = exact
    assert progress.phases == [
        *(f"{name} main" for name in ("tokenizer", "convert", "write")),
        *(f"{name} draft" for name in ("convert", "write")),
        "hash",
    ]
    assert progress.num_bytes > sum(file.size for file in bundle.manifest.files)  # and the checkpoints' weights


# GGUF


def test_codes_of_a_file_are_kept(make_checkpoint: Any, make_gguf: Any, tmp_path: Path) -> None:
    """Minima included: rounded ones give 0.12."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    path = make_gguf("wide", make_checkpoint("wide", **shape), quantisation="Q4_K")
    exact, kept = (
        logits_in(export_bundle(path, output=tmp_path / weights, weights=weights), "main")
        for weights in ("fp32", "int4")
    )
    assert np.linalg.norm(kept - exact) < 0.02 * np.linalg.norm(exact)


def test_gguf_is_dequantised(make_checkpoint: Any, make_gguf: Any, convert: Any) -> None:
    """F32 to fp32 must be the torch model; Q5_0 to int4. Main untied, draft tied."""
    main = make_checkpoint("gguf-main", vocab_size=512, seed=3, tie_word_embeddings=False)
    draft = make_checkpoint("gguf-draft", vocab_size=448, seed=4)
    main_file, draft_file = make_gguf("exact", main, quantisation="F32"), make_gguf("five", draft, quantisation="Q5_0")
    bundle, progress = convert(main_file, draft_file, weights="fp32", draft_weights="int4")
    assert error_of(bundle, "main", main) < 1e-5
    assert error_of(bundle, "draft", draft) < 0.5
    assert progress.notes == []
    entries = bundle.manifest.main, bundle.manifest.drafters[0].model
    assert [entry.weights for entry in entries] == ["fp32", "int4"]
    assert [entry.source.recipe["tied_embeddings"] for entry in entries] == ["false", "true"]
    assert matrices(bundle, "main", 512) == {"f32": 2}
    assert matrices(bundle, "draft", 448) == {"u8": 1}
    assert bundle.manifest.tokenizer.eos_token_ids == (400, 402)


def test_gguf_and_checkpoint_of_one_family_fit(make_checkpoint: Any, make_gguf: Any, tied: Path, convert: Any) -> None:
    """[PADxxx] entries fill the GGUF's vocabulary and are not tokens."""
    path = make_gguf("padded", make_checkpoint("padded", vocab_size=512, seed=5), quantisation="Q8_0")
    assert len(read_header(path).metadata["tokenizer.ggml.tokens"]) == 512
    bundle, _ = convert(path, tied, weights="int4")
    assert bundle.manifest.main.vocab_sha256 == bundle.manifest.drafters[0].model.vocab_sha256


@pytest.mark.parametrize(("role", "form", "weights", "expected"), [
    ("main", "openvino", None, "int8"),
    ("draft", "openvino", None, "int8"),  # it is small
    ("main", "onnx", None, "int8"),
    ("main", "openvino", "fp16", "fp16"),
])  # fmt: skip
def test_gguf_files_have_the_weights_of_others(
    make_checkpoint: Any, make_gguf: Any, role: str, form: Format, weights: str | None, expected: str
) -> None:
    path = make_gguf("plain", make_checkpoint("plain"))
    assert make_plan(role, locate(path), form, weights).weights == expected


def test_draft_models_have_4_bits_unless_they_are_small() -> None:
    sizes = {"main": 10**9, "draft": 494_000_000, "draft ": 134_500_000}
    found = [default_weights(role.strip(), size) for role, size in sizes.items()]
    assert found == ["int8", "int4", "int8"]


def test_without_the_extra_other_architectures_name_it(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_export.extras.is_installed", lambda package: package != "torch")
    config = json.loads((tied / "config.json").read_text(encoding="utf-8")) | {"hidden_act": "relu2"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    told = r"other, which has the activation 'relu2', needs torch, .* Run: pip install \".*\[export\]\"$"
    with pytest.raises(ExportError, match=told):
        export_bundle(tmp_path / "other", output=tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


# What does not go together


def test_more_tokens_than_logits_are_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = make_checkpoint("narrow", vocab_size=403)
    with pytest.raises(ExportError, match="narrow has 404 tokens and an output matrix for 403"):
        export_bundle(folder, output=tmp_path / "b")


# Checkpoints that are not what they should be


@pytest.fixture
def copy(tied: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(tied, folder)
    return folder


def change(copy: Path, **changes: Any) -> None:
    """Change keys of config.json. None takes one out."""
    config = json.loads((copy / "config.json").read_text(encoding="utf-8")) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")


def have_pickles(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n.")


def truncate(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-100])


def lack_a_shard(copy: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize(("damage", "message"), [
    (have_pickles, r"weights as pickles only \(pytorch_model\.bin\), which run code"),
    (truncate, r"model\.safetensors is missing or damaged: it has .* bytes of"),
    (lambda copy: (copy / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60)), "missing or damaged"),
    (lack_a_shard, r"model-00002-of-00002\.safetensors is missing or damaged"),
    (lambda copy: (copy / "tokenizer.json").unlink(), r"has no tokenizer\.json"),
    (lambda copy: change(copy, architectures=["BertForMaskedLM"]),
     "holds a BertForMaskedLM; Outrider runs causal language models"),
    (lambda copy: change(copy, quantization_config={"quant_method": "gptq"}), r"is quantised already \(gptq\)"),
    (lambda copy: change(copy, num_hidden_layers=None), "num_hidden_layers"),
])  # fmt: skip
def test_damaged_and_unfit_checkpoints_are_refused(
    copy: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(copy)
    with pytest.raises(ExportError, match=message):
        export_bundle(copy, output=tmp_path / "b")


@pytest.mark.slow
def test_remote_code_runs_only_where_it_is_trusted(copy: Path, tmp_path: Path) -> None:
    """The checkpoint's own code leaves a file behind when it is loaded."""
    trace = tmp_path / "ran"
    own = {"AutoConfig": "strange.Config", "AutoModelForCausalLM": "strange.StrangeForCausalLM"}
    change(copy, model_type="strange", architectures=["StrangeForCausalLM"], auto_map=own)
    code = f"open({str(trace)!r}, 'w').close()\nraise ImportError('ran')\n"
    (copy / "strange.py").write_text(code, encoding="utf-8")
    with pytest.raises(ExportError, match="The main model checkpoint cannot be converted"):
        export_bundle(copy, output=tmp_path / "b")
    assert not trace.exists()
    with pytest.raises(ExportError, match="ran"):
        export_bundle(copy, output=tmp_path / "b", trust_remote_code=True)
    assert trace.exists()
    assert not (tmp_path / "b").exists()


def test_every_eos_id_is_found(copy: Path) -> None:
    from outrider_export.describe.special_tokens import eos_of_folder
    from outrider_export.tokenizers.vocabulary import Vocabulary

    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 402]}), encoding="utf-8")
    vocabulary = Vocabulary.of_folder(copy)
    # From generation_config.json (7, 402), config.json (9), tokenizer_config.json (402), and by name (400).
    assert eos_of_folder(copy, {"eos_token_id": 9}, vocabulary) == (7, 9, 400, 402)
    assert eos_of_folder(copy, {"eos_token_id": 99_999}, vocabulary) == (7, 400, 402)
