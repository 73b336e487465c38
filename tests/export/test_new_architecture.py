"""docs/new-architecture.md, walked: from a configuration that nobody knows to the logits of its model."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from exports import error_of, logits_of_ir
from outrider.cli import run
from outrider.cli.console import out
from outrider.errors import ExportError
from outrider_export.describe.parts import report_of
from outrider_export.direct import archs
from outrider_export.direct.convert import convert
from outrider_export.direct.describe import describe
from outrider_export.progress import Silent
from shapes import logits_of, make_model

PAGE = (Path(__file__).parents[2] / "docs" / "new-architecture.md").read_text(encoding="utf-8")
TOKENS = np.random.default_rng(3).integers(0, 400, size=48).tolist()
CONFIG = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0])
SHOWN, ENTRY = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


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
    monkeypatch.setitem(archs.ARCHS, "acorn", eval(ENTRY, vars(archs)))  # noqa: S307 - the page's own
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


_YARN = {
    "rope_type": "yarn", "rope_theta": 5e5, "factor": 16.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
    "beta_slow": 1.0, "attention_factor": 1.2772588722239782,
}  # fmt: skip
# Keys and sizes as published: (config.json, layers, those with a window, numbers that rotate, experts, active ones).
PUBLISHED: dict[str, tuple[dict[str, Any], int, int, int, int, int]] = {
    "mellum": (
        {
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 7168,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 7, "max_position_embeddings": 131072,
            "max_window_layers": 0, "mlp_layer_types": ["sparse"] * 28, "moe_intermediate_size": 896,
            "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 64, "num_experts_per_tok": 8,
            "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "use_sliding_window": True,
            "rope_parameters": {
                "full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
            "sliding_window": 1024, "tie_word_embeddings": False,
        },
        28, 21, 128, 64, 8,
    ),
    "granite_swa": (
        {
            "hidden_size": 2560, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 20,
            "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-05,
            "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "sliding_window": 128,
            "layer_types": ["full_attention", *["sliding_attention"] * 3] * 6, "embedding_multiplier": 12,
            "residual_multiplier": 0.28, "logits_scaling": 10, "attention_multiplier": 0.0078125, "rope_theta": 10000,
        },
        24, 18, 128, 0, 0,
    ),
    "bailing_moe_v2": (
        {
            "attention_dropout": 0.0, "num_hidden_layers": 20, "hidden_size": 2048, "intermediate_size": 5120,
            "first_k_dense_replace": 1, "hidden_act": "silu", "max_position_embeddings": 32768, "head_dim": 128,
            "moe_intermediate_size": 512, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_attention_heads": 16,
            "num_experts": 256, "num_key_value_heads": 4, "rope_theta": 600000, "rope_scaling": None,
            "rms_norm_eps": 1e-06, "num_shared_experts": 1, "use_qkv_bias": False, "norm_head": False,
            "partial_rotary_factor": 0.5, "router_dtype": "fp32", "moe_router_enable_expert_bias": True,
            "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "use_qk_norm": True,
            "score_function": "sigmoid", "moe_shared_expert_intermediate_size": 512,
        },
        20, 0, 64, 256, 8,
    ),
    "nemotron_h": (
        {
            "hybrid_override_pattern": "MEMEM*EMEMEM*E", "hidden_size": 2688, "intermediate_size": 1856,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "layer_norm_epsilon": 1e-5,
            "mlp_hidden_act": "relu2", "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
            "ssm_state_size": 128, "conv_kernel": 4, "n_routed_experts": 128, "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_shared_experts": 1,
            "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
            "max_position_embeddings": 262144, "num_hidden_layers": 14,
        },
        8, 0, 128, 128, 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_of_newcomers_are_described(name: str) -> None:
    config, layers, sliding, rotary, experts, active = PUBLISHED[name]
    found = describe({"model_type": name, **config})
    assert (len(found.layers), sum(window > 0 for window in found.windows)) == (layers, sliding)
    assert found.rotary_size == rotary
    mixture = found.experts
    assert ((mixture.count, mixture.active) if mixture else (0, 0)) == (experts, active)
