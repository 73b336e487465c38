"""Checkpoints that read images, of which the text part is converted, and recurrences that are damaged."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from exports import Recorder, error_of, logits_of_ir
from outrider.cli import run
from outrider.cli.console import out
from outrider.errors import ExportError
from outrider_export.describe.geometry import geometry_of_config
from outrider_export.describe.parts import report_of
from outrider_export.describe.plan import check_route
from outrider_export.direct import archs
from outrider_export.direct.convert import convert
from outrider_export.progress import Silent
from outrider_export.sources.safetensors import count_weights
from outrider_export.sources.source import locate, read_config, text_part
from shapes import CONFIGS, logits_of, make_model

TOKENS = np.random.default_rng(3).integers(0, 400, size=48).tolist()
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def reads_images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random Qwen3.5 that reads images, as published: with a drafter's layer beside it."""
    import torch
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    folder = tmp_path_factory.mktemp("reads-images")
    tokens = {f"{name}_token_id": 440 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))}
    text = CONFIGS["qwen3_5_text"] | {"tie_word_embeddings": True}
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=True, **tokens)
    model = Qwen3_5ForConditionalGeneration(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights |= {"mtp.fc.weight": np.ones((64, 128), np.float32), "mtp.layers.0.mlp.up_proj.weight": np.ones((96, 64))}
    save_file(weights, folder / "model.safetensors")
    return model, folder


def test_the_text_part_is_converted_and_says_so(reads_images: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = reads_images
    told = Recorder()
    job = {"model": str(folder), "gguf": False, "weights": "fp32", "format": "openvino", "output": str(tmp_path / "ir")}
    convert(job, told)
    assert any("Its text part is converted" in note for note in told.notes)
    found = logits_of_ir(tmp_path / "ir" / "openvino_model.xml", TOKENS)
    assert error_of(found, logits_of(model, TOKENS)) < 5e-5  # Transformers in f32 is 1.4e-5 from itself in f64


def test_its_configuration_is_that_of_the_text(reads_images: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = reads_images
    config = read_config(folder)
    geometry = geometry_of_config(config, folder)
    assert (geometry.architecture, geometry.num_layers, geometry.head_size) == ("qwen3_5_text", 4, 32)
    assert config["tie_word_embeddings"]
    weights = load_file(folder / "model.safetensors")  # Transformers saves the encoder below the text's name
    text = sum(each.size for name, each in weights.items() if "language" in name and ".visual." not in name)
    assert count_weights(folder) == text
    monkeypatch.setattr("outrider_export.extras.missing", lambda _: ["torch"])
    check_route(locate(folder), "openvino")  # without PyTorch


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("published", ["gemma4", "gemma4_unified"])
def test_gemma_4_is_read_without_images_and_sounds(published: str, tmp_path: Path) -> None:
    """Of the 12B, which Transformers 5.5 does not know, classes and types have another name."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    config = Gemma4Config(text_config=CONFIGS["gemma4_text"], vision_config=None, audio_config=None)
    model = Gemma4ForConditionalGeneration(config).float().eval()
    model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    said |= {"audio_config": {"model_type": f"{published}_audio", "hidden_size": 8}}
    if published == "gemma4_unified":
        said |= {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": published}
        said["text_config"]["model_type"] = f"{published}_text"
    (tmp_path / "config.json").write_text(json.dumps(said), encoding="utf-8")
    geometry = geometry_of_config(read_config(tmp_path), tmp_path)
    assert (geometry.architecture, geometry.hidden_size, geometry.head_size) == ("gemma4_text", 64, 16)
    told = Recorder()
    job = {"model": str(tmp_path), "gguf": False, "weights": "fp32", "format": "openvino"}
    done = convert(job | {"output": str(tmp_path / "ir")}, told)
    assert any("Its text part is converted" in note for note in told.notes)
    assert [*done["layers"]["kv_shapes"]] == [(2, 16), (2, 32), (2, 16), (2, 32), (0, 0), (0, 0)]
    found = logits_of_ir(tmp_path / "ir" / "openvino_model.xml", TOKENS)
    assert error_of(found, logits_of(model, TOKENS)) < 5e-5


def test_llama_4_is_read_without_images_up_to_its_first_chunk(tmp_path: Path) -> None:
    """As it is published; the length is announced, and is the bundle's."""
    model = make_model("llama4_text", attention_chunk_size=128)
    model.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    said = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(said | {"vision_config": {}}), encoding="utf-8")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"language_model.{name}": each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    report = report_of(tmp_path)
    assert (report.missing, report.verdict) == ([], "It has an entry.")
    told = Recorder()
    job = {"model": str(tmp_path), "gguf": False, "weights": "fp32", "format": "openvino"}
    done = convert(job | {"output": str(tmp_path / "ir")}, told)
    assert done["layers"]["context_length"] == 128
    assert any("Its context length is 128: see 'Llama 4' in docs/models.md" in note for note in told.notes)
    found = logits_of_ir(tmp_path / "ir" / "openvino_model.xml", TOKENS)
    assert error_of(found, logits_of(model, TOKENS)) < 5e-6


def test_a_text_part_with_a_class_of_its_own_hides_no_images(tmp_path: Path) -> None:
    text = {"architectures": ["VLlama3ForCausalLM"], "model_type": "llama"}
    config = {"architectures": ["SmolVLMForConditionalGeneration"], "vision_config": {}, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = read_config(tmp_path)
    assert (found["architectures"], found["model_type"]) == (config["architectures"], "llama")


def test_a_damaged_text_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3_5ForConditionalGeneration"]}))
    with pytest.raises(ExportError, match="config.json is damaged: a value in it is not what it has to be"):
        read_config(tmp_path)
    assert text_part({"architectures": ["LlamaForCausalLM"], "text_config": 1})["text_config"] == 1


@pytest.mark.parametrize(("name", "shape", "says"), [
    ("A_log", (3,), r"linear_attn\.A_log has 3 numbers, and has to have 4"),
    ("A_log", None, r"has no matrix model\.layers\.0\.linear_attn\.A_log"),
    ("conv1d.weight", (160, 1, 3), r"linear_attn\.conv1d\.weight has 480 numbers, and has to have 640"),
    ("in_proj_b.weight", (4, 32), r"linear_attn\.in_proj_b\.weight is \[4, 32\] and has to be \[4, 64\]"),
])  # fmt: skip
def test_a_damaged_recurrence_is_named(name: str, shape: Any, says: str, reads_images: Any, tmp_path: Path) -> None:
    weights = load_file(reads_images[1] / "model.safetensors")
    whole = f"model.language_model.layers.0.linear_attn.{name}"
    del weights[whole]
    weights |= {} if shape is None else {whole: np.ones(shape, np.float32)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((reads_images[1] / "config.json").read_bytes())
    job = {
        "model": str(tmp_path), "gguf": False, "weights": "int8", "format": "openvino", "output": str(tmp_path / "ir"),
    }  # fmt: skip
    with pytest.raises(ExportError, match=says):
        convert(job, Recorder())


# docs/new-architecture.md, walked: from a configuration that nobody knows to the logits of its model.


PAGE = (Path(__file__).parents[2] / "docs" / "new-architecture.md").read_text(encoding="utf-8")
CONFIG = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0])
SHOWN, ENTRY = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[0] for kind in ("text", "toml"))


@pytest.fixture(scope="module")
def acorn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """An EXAONE 4 by other names, and its checkpoint."""
    model, folder = make_model("exaone4"), tmp_path_factory.mktemp("acorn")
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({name.replace("o_proj", "out_proj"): values for name, values in load_file(path).items()}, path)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return model, folder


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("of_folder", [True, False])
def test_inspect_says_what_the_page_says(
    of_folder: bool, acorn: tuple[Any, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "width", 160)
    monkeypatch.setattr("outrider_export.extras.missing", lambda _: ["torch"])
    assert run(["inspect", str(acorn[1] if of_folder else acorn[1] / "config.json")]) == 0
    assert lines(capsys.readouterr().out) == lines(SHOWN)


def test_the_entry_gives_the_model(
    acorn: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = acorn
    monkeypatch.setitem(archs.ARCHS, "acorn", archs.arch_of("acorn", archs.read(archs.TEXT + ENTRY)["acorn"]))
    job = {"model": str(folder), "gguf": False, "weights": "fp32", "format": "openvino", "output": str(tmp_path / "ir")}
    convert(job, Silent())
    assert error_of(logits_of_ir(tmp_path / "ir" / "openvino_model.xml", TOKENS), logits_of(model, TOKENS)) < 5e-6
    assert run(["inspect", str(folder / "config.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "It has an entry."


@pytest.mark.parametrize(("change", "missing"), [
    ({"index_topk": 512}, "sparse attention with an indexer"),
    ({"hidden_act": "relu2"}, "activation"),
    ({"layer_types": ["chunked_attention"] * 4}, "layers"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rotation"),
    ({"num_experts": 8, "scoring_func": "sinkhorn"}, "experts"),
    ({"hidden_size": None}, "sizes"),
])  # fmt: skip
def test_what_is_missing_is_named(change: dict[str, Any], missing: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | change), encoding="utf-8")
    report = report_of(path)
    assert [part.name for part in report.missing] == [missing]
    assert missing in report.verdict


def test_a_key_that_nothing_reads_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"layer_rope_theta": [1e4] * 4, "hash_layers": 2}), encoding="utf-8")
    report = report_of(path)
    assert report.elsewhere["layer_rope_theta"] == "granite_swa"
    assert report.unread == ("hash_layers",)


def test_of_a_model_that_reads_images_the_text_part_is_looked_at(tmp_path: Path) -> None:
    whole = {"architectures": ["OakForConditionalGeneration"], "model_type": "oak", "vision_config": {}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole | {"text_config": CONFIG}), encoding="utf-8")
    report = report_of(path)
    assert (report.architecture, report.like, report.missing) == ("acorn", "llama", [])
    path.write_text(json.dumps(whole | {"text_config": CONFIG | {"model_type": "llama"}}), encoding="utf-8")
    assert report_of(path).verdict.startswith("Its text part has an entry; its images are laid out in a way that")


@pytest.mark.parametrize("content", [None, "{}", "[1]"])
def test_what_is_no_configuration_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ExportError, match=r"config\.json"):
        report_of(tmp_path)


def test_options_of_bundles_are_refused(acorn: tuple[Any, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(acorn[1] / "config.json"), "--check"]) == 2
    assert "--check is for models that can be exported" in capsys.readouterr().err
