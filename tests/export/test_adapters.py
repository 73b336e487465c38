"""Adapters in PEFT's format: read, merged as PEFT merges them, added to bundles; what does not fit changes nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

import outrider
from adapters import changes_of, write_adapter
from calls import rows_of_call
from exports import content
from outrider.bundle import Bundle
from outrider.cli import run
from outrider.errors import BundleError, ExportError, OptionError, OutriderError
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.registry import compile_model
from outrider.models.tuning.measure.readings import read
from outrider.models.tuning.model_spec import ModelSpec, adapters_of
from outrider.models.tuning.setting import Setting
from outrider.testing import save_toy_bundle
from outrider.types import Chunk, Prompt
from outrider_export import add_adapter, export_bundle
from outrider_export.sources.peft_adapter import read_adapter
from outrider_export.with_torch.convert import merge
from shapes import cosines
from tiny import SHAPE

TOKENS = [*np.random.default_rng(0).integers(20, 400, 32).tolist()]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def spoil_config(**fields: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        known = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        (folder / CONFIG).write_text(json.dumps(known | fields), encoding="utf-8")

    return spoil


def spoil_tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return spoil


PLACE = "base_model.model.model.layers.1.mlp.up_proj.lora_"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda f: (f / CONFIG).unlink(), "is no adapter: it has no adapter_config.json"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "has no adapter_model.safetensors. Save the adapter with"),
    "damaged weights": (lambda f: (f / WEIGHTS).write_bytes(b"\x07" * 99), "is missing or damaged"),
    "damaged configuration": (lambda f: (f / CONFIG).write_text("{"), "adapter_config.json"),
    "another kind": (spoil_config(peft_type="IA3"), "has peft_type 'IA3', and only LORA is read"),
    "biases": (spoil_config(bias="all"), "has bias='all': it trains biases"),
    "DoRA": (spoil_config(use_dora=True), "has use_dora='True', and such adapters are not read"),
    "whole modules": (spoil_config(modules_to_save=["lm_head"]), "has modules_to_save="),
    "a field of tomorrow": (spoil_config(use_tomorrow=1), "has use_tomorrow='1', and such adapters are not read"),
    "PiSSA": (spoil_config(init_lora_weights="pissa_niter_4"), "a part of the model's weights was taken out"),
    "no rank": (spoil_config(r=0), "has r=0, which has to be a number above 0"),
    "another rank": (spoil_config(r=8), r"lora_A \[4, \d+\] and lora_B \[\d+, 4\] for .*, and .* says rank 8"),
    "a missing target": (spoil_config(target_modules=["q_proj", "qkv_proj"]), "has nothing for 'qkv_proj'"),
    "a missing layer": (spoil_config(layers_to_transform=[0]), r"has layers \[0, 1\], and .*layers_to_transform=\[0\]"),
    "one side": (spoil_tensors(lambda t: t.pop(f"{PLACE}B.weight")), "has no lora_B for model.layers.1.mlp.up_proj"),
    "not a number": (spoil_tensors(lambda t: t[f"{PLACE}A.weight"].fill(np.nan)), "not finite in lora_A of"),
    "an embedding": (
        spoil_tensors(lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 9))})),
        "which is no lora_A or lora_B of a module",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_adapters_are_refused_in_a_line(fault: str, tmp_path: Path) -> None:
    spoil, says = FAULTS[fault]
    adapter = write_adapter(tmp_path / "adapter", SHAPE)
    spoil(adapter)
    with pytest.raises(ExportError, match=says) as error:
        read_adapter(adapter)
    assert "\n" not in str(error.value)


def test_scales_are_peft_s(tmp_path: Path) -> None:
    patterns: dict[str, Any] = {"alpha_pattern": {"up_proj": 5, "layers.1.self_attn.q_proj": 3}, "lora_alpha": 7}
    for name, stable in (("plain", False), ("stable", True)):

        def scale(r: int, alpha: int, power: float = 0.5 if stable else 1.0) -> float:
            return alpha / float(r**power)

        adapter = write_adapter(tmp_path / name, SHAPE, ranks={"v_proj": 9}, use_rslora=stable, **patterns)
        modules = read_adapter(adapter).modules
        found = {(place, modules[f"model.layers.{place}"].scale) for place in ("0.self_attn.q_proj", "1.mlp.up_proj")}
        assert found == {("0.self_attn.q_proj", scale(4, 7)), ("1.mlp.up_proj", scale(4, 5))}
        assert modules["model.layers.1.self_attn.q_proj"].scale == scale(4, 3)
        assert modules["model.layers.1.self_attn.v_proj"].scale == scale(9, 7)


def test_weights_are_merged_as_by_hand(make_checkpoint: Any, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(make_checkpoint("merged"), dtype=dtype)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        adapter = write_adapter(tmp_path / str(dtype), SHAPE, use_rslora=True, ranks={"o_proj": 7}, lora_alpha=3)
        merge(model, read_adapter(adapter))
        changes = changes_of(adapter)
        assert len(changes) == 14
        for name, weight in model.state_dict().items():
            wanted = before[name].float() + torch.from_numpy(changes.get(name, np.zeros(1, np.float32)))
            torch.testing.assert_close(weight, wanted.to(dtype))


def test_nothing_is_merged_that_does_not_fit(make_checkpoint: Any, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint("merged"))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    wide = write_adapter(tmp_path / "wide", SHAPE | {"intermediate_size": 160})
    deep = write_adapter(tmp_path / "deep", SHAPE | {"num_hidden_layers": 3})
    output = write_adapter(tmp_path / "output", SHAPE, targets=())
    rows = {"A": (4, 64), "B": (448, 4)}
    save_file(
        {f"base_model.model.lm_head.lora_{s}.weight": np.ones(rows[s], np.float32) for s in rows}, output / WEIGHTS
    )
    for folder, says in (
        (wide, r"by \[64, 160\] weights, and the model has \[64, 128\] there. Name .*, not for org/tiny"),
        (deep, r"model.layers.2.* the model does not have"),
        (output, "changes lm_head, which shares its weights with the embedding"),
    ):
        with pytest.raises(ExportError, match=says):
            merge(model, read_adapter(folder))
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_adapters_are_added_and_described(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(folder)
    adapter = write_adapter(tmp_path / "pirate", SHAPE, targets=("v_proj", "q_proj"))
    assert run(["add", str(folder), str(adapter)]) == 0
    assert "has an adapter 'pirate' (rank 4 in q_proj, v_proj," in capsys.readouterr().out.replace("\n", " ")
    assert run(["add", str(folder), str(adapter), "--name", "again", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["targets"] == ["self_attn.q_proj", "self_attn.v_proj"]
    bundle = outrider.read_bundle(folder)
    assert [each.name for each in bundle.manifest.adapters] == ["pirate", "again"]
    assert bundle.manifest.adapters[0].source.sha256 == content(adapter)[WEIGHTS]
    after = content(folder)
    assert all(after[name] == digest for name, digest in before.items() if name != "outrider.json")
    assert run(["inspect", str(folder)]) == 0
    assert "adapter again" in capsys.readouterr().out
    prompt = [str(folder), "The fox", "--max-new-tokens", "3", "--ignore-eos", "--cache-size", "0.01", "--json"]
    assert run(["generate", *prompt, "--adapter", "again"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 3
    assert run(["generate", *prompt, "--adapter", "nobody", "--adapters", "again"]) == 2
    assert "no adapter 'nobody' here: loaded are 'again'" in capsys.readouterr().err


def test_what_does_not_fit_a_bundle_changes_nothing(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "pirate", SHAPE, seed=1)
    add_adapter(folder, adapter)
    before = content(folder)
    wide = write_adapter(tmp_path / "wide", SHAPE | {"intermediate_size": 160})
    deep = write_adapter(tmp_path / "deep", SHAPE | {"num_hidden_layers": 3})
    other = write_adapter(tmp_path / "other", SHAPE)
    tensors = {name.replace("mlp.up_proj", "mlp.experts"): each for name, each in load_file(other / WEIGHTS).items()}
    save_file(tensors, other / WEIGHTS)
    spoil_config(target_modules="all-linear")(other)
    cases: list[tuple[Path, dict[str, Any], type[OutriderError], str]] = [
        (adapter, {}, OptionError, "has an adapter 'pirate' already"),
        (adapter, {"name": "none"}, OptionError, "name='none' cannot be an adapter's"),
        (adapter, {"name": "a:b"}, OptionError, "name='a:b' cannot be an adapter's"),
        (wide, {}, BundleError, "with lora_A .4, 160., and this model has 128 numbers before it instead of 160"),
        (deep, {}, BundleError, "for a model with layer 2, and this one's layers are 0 to 1"),
        (other, {}, BundleError, "changes mlp.experts, and it can be self_attn.q_proj"),
        (tmp_path, {}, ExportError, "is no adapter"),
    ]
    for path, options, kind, says in cases:
        with pytest.raises(kind, match=says):
            add_adapter(folder, path, **options)
        assert content(folder) == before
    file = folder / "adapter-pirate" / "adapter.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(BundleError, match="adapter.bin is not the file that was exported"):
        outrider.load(folder)


def test_models_with_states_take_no_adapters_by_request(tmp_path: Path) -> None:
    bundle = save_toy_bundle(tmp_path / "toy", states=True, padded=False)
    adapter = write_adapter(tmp_path / "pirate", SHAPE)
    with pytest.raises(ExportError, match="whose layers keep states, .* Merge it at export: outrider export MODEL"):
        add_adapter(bundle.folder, adapter)


def rows_of(bundle: Bundle, adapter: str | None = None) -> np.ndarray:
    """The main model's logits in f32, float32 [n, vocab]."""
    main = bundle.manifest.main
    part = ModelSpec("main", bundle, main, adapters=adapters_of(bundle))
    backend = compile_model(part, Setting("f32", "auto", group_size=0))
    backend.allocate(256)
    if not isinstance(backend, OpenVINOPaged):
        return read(backend, TOKENS, [len(TOKENS)], len(TOKENS))
    slot = backend.open(64, Prompt((), adapter=adapter))
    assert slot is not None
    return rows_of_call(backend, Chunk(slot, TOKENS, len(TOKENS)))


def test_merged_and_at_run_time_are_the_reference(make_checkpoint: Any, convert: Any, tmp_path: Path) -> None:
    """As torch calculates it from weights with the adapter added by hand."""
    checkpoint = make_checkpoint("adapted")
    adapter = write_adapter(tmp_path / "pirate", SHAPE, seed=1, rank=6)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    weights = dict(model.state_dict())
    for name, change in changes_of(adapter).items():
        weights[name] = weights[name] + torch.from_numpy(change)
    with torch.no_grad():
        plain = model(torch.tensor([TOKENS])).logits[0].numpy()
        model.load_state_dict(weights)
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    merged = export_bundle(checkpoint, output=tmp_path / "merged", weights="fp32", adapter=adapter)
    assert merged.manifest.main.source.recipe["adapter"] == "pirate"
    assert merged.manifest.main.source.recipe["adapter_sha256"] == content(adapter)[WEIGHTS]
    shutil.copytree(convert(checkpoint, weights="fp32")[0].folder, tmp_path / "bundle")
    added = add_adapter(tmp_path / "bundle", adapter)
    for found, wanted in (
        (rows_of(merged), expected),
        (rows_of(added, "pirate"), expected),
        (rows_of(added), plain),
    ):
        assert cosines(found, wanted[:, : found.shape[1]]).min() >= 0.9999
    assert cosines(plain, expected).max() < 0.99
