"""Architectures that are refused at export, before anything is written, and what is read of others' configurations."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bundle.manifest import Geometry
from outrider.errors import ExportError
from outrider_export import export_bundle
from outrider_export.describe.architectures import ARCHITECTURES, describe_layers, settle_positions
from outrider_export.describe.geometry import geometry_of_config
from outrider_export.describe.plan import check_route
from outrider_export.sources.source import locate, text_part
from outrider_export.with_torch.convert import load
from shapes import CONFIGS

WHERE = Path("folder")
LLAMA = {
    "model_type": "llama", "num_attention_heads": 8, "num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 448,
    "max_position_embeddings": 512,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_head": 8, "n_layer": 3, "n_embd": 64, "vocab_size": 448, "n_positions": 512}


@pytest.mark.parametrize(("changes", "says"), [
    ({"model_type": "mamba"}, "'mamba' is not supported: its layers keep a state"),
    ({"model_type": "jamba"}, "'jamba' is not supported: its layers keep a state"),
    ({"layer_types": ["recurrent", "attention"]}, "'llama' is not supported: its layer_types have .recurrent."),
    ({"model_type": "mamba2"}, "only in models that have attention, too. Run it with llama.cpp"),
    ({"model_type": "gpt_neo"}, "ignores the window of its local attention"),
    ({"head_dim": 16, "global_head_dim": 32}, "heads of 16 and of 32 numbers"),
])  # fmt: skip
def test_nothing_is_written_for_a_refused_architecture(
    changes: dict[str, Any], says: str, make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in make_checkpoint("refused").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "config.json").write_text(json.dumps(LLAMA | changes), encoding="utf-8")
    monkeypatch.setattr("outrider_export.bundles.convert_model.run_child", lambda *_: pytest.fail("it began"))
    with pytest.raises(ExportError, match=says) as caught:
        export_bundle(source, output=tmp_path / "bundle")
    assert "docs/models.md" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("changes", "says"), [
    ({"model_type": "mpt"}, "'mpt' is not supported"),
    ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "holds a BertForMaskedLM; Outrider runs causal"),
    ({"architectures": ["GlmImageForConditionalGeneration"], "vision_config": {}}, "images are laid out in a way"),
    ({"quantization_config": {"quant_method": "awq"}}, r"is quantised already \(awq\)"),
])  # fmt: skip
@pytest.mark.parametrize("form", ["openvino", "onnx"])
def test_what_no_package_helps_is_said_before_packages_are_asked_for(
    form: Any, changes: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_export.extras.is_installed", lambda package: False)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes), encoding="utf-8")
    with pytest.raises(ExportError, match=says) as caught:
        check_route(locate(tmp_path), form)
    assert "pip install" not in str(caught.value)


def test_the_message_about_packages_says_that_they_may_not_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_export.extras.is_installed", lambda package: False)
    new = {"model_type": "new", "architectures": ["NewForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | new), encoding="utf-8")
    with pytest.raises(ExportError, match=r"needs torch, .*; the model is none of docs/models\.md, so"):
        check_route(locate(tmp_path), "openvino")


def test_a_gguf_file_that_does_not_run_asks_for_no_package(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_export.extras.is_installed", lambda package: False)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file.read_bytes().replace(b"qwen2", b"rwkv7"))
    with pytest.raises(
        ExportError, match=r"model\.gguf cannot be exported\. The architecture 'rwkv7' is not supported"
    ):
        check_route(locate(path), "openvino")


@pytest.mark.parametrize(("config", "expected"), [
    (LLAMA, Geometry("llama", 3, 8, 8, 8, 64, 512, 448)),
    (LLAMA | {"num_key_value_heads": 2, "head_dim": 32}, Geometry("llama", 3, 8, 2, 32, 64, 512, 448)),
    (GPT2, Geometry("gpt2", 3, 8, 8, 8, 64, 512, 448)),
    (GPT2 | {"model_type": "gpt_bigcode", "multi_query": True}, Geometry("gpt_bigcode", 3, 8, 1, 8, 64, 512, 448)),
    (LLAMA | {"model_type": "falcon", "multi_query": True}, Geometry("falcon", 3, 8, 1, 8, 64, 512, 448)),
    (LLAMA | {"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2},
     Geometry("falcon", 3, 8, 2, 8, 64, 512, 448)),
])  # fmt: skip
def test_shapes_are_read_from_configurations(config: dict[str, Any], expected: Geometry) -> None:
    assert geometry_of_config(config, WHERE) == expected


@pytest.mark.parametrize("key", ["model_type", "vocab_size", "hidden_size", "max_position_embeddings"])
def test_a_missing_key_is_named(key: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != key}
    with pytest.raises(ExportError, match=rf"config\.json has no '{key}'"):
        geometry_of_config(config, WHERE)


def described(architecture: str) -> dict[str, Any]:
    from transformers import AutoConfig

    return describe_layers(AutoConfig.for_model(architecture, **CONFIGS[architecture]))


def test_layers_are_read_from_configurations() -> None:
    assert described("llama") == {"num_experts": 0, "num_active_experts": 0}
    assert described("mixtral") == {"num_experts": 4, "num_active_experts": 2}
    assert described("qwen3_moe") == {"num_experts": 4, "num_active_experts": 2}


def test_longrope_gets_one_set_of_frequencies() -> None:
    """With two, a row would depend on whether another row of its call is after the limit."""
    rope = {
        "rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 64,
    }  # fmt: skip
    rope |= {"short_mscale": 1.1, "long_mscale": 1.2}
    assert settle_positions(SimpleNamespace(rope_parameters=rope)) == {"context_length": 64}
    assert rope["long_factor"] == [1.0]
    assert rope["long_mscale"] == 1.1
    assert settle_positions(SimpleNamespace(rope_parameters={"rope_type": "yarn"})) == {}
    assert settle_positions(SimpleNamespace()) == {}


def test_every_architecture_that_is_tried_has_a_tiny_model() -> None:
    assert [*CONFIGS] == [*ARCHITECTURES]


@pytest.mark.parametrize(("name", "kind", "expected"), [
    ("DeepseekV3ForCausalLM", "kimi_k2", "deepseek_v3"), ("BailingMoeV2ForCausalLM", "bailing_moe", "bailing_moe_v2"),
    ("DeepseekV3ForCausalLM", "deepseek_v3", "deepseek_v3"), ("KimiForCausalLM", "kimi_k2", "kimi_k2"),
])  # fmt: skip
def test_architectures_by_another_name_are_known(name: str, kind: str, expected: str) -> None:
    assert text_part({"architectures": [name], "model_type": kind})["model_type"] == expected


@pytest.mark.parametrize("missing", [(), ("pooler.dense.weight",), ("lm_head.weight", "model.norm.weight")])
def test_weights_that_torch_would_draw_at_random_are_named(missing: tuple[str, ...]) -> None:
    def from_pretrained(*_: object, **options: object) -> Any:
        assert options == {
            "local_files_only": True,
            "output_loading_info": True,
            "use_safetensors": True,
            "dtype": "auto",
        }
        return "the model", {"missing_keys": {*missing}}

    loader = SimpleNamespace(from_pretrained=from_pretrained)
    if len(missing) < 2:
        assert load(loader, "folder", dtype="auto") == "the model"
        return
    with pytest.raises(ExportError, match="folder has no lm_head.weight, one of 2 tensors that its configuration asks"):
        load(loader, "folder", dtype="auto")
