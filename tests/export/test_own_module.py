"""An MTP module in a main model's own files comes along as its drafter, without PyTorch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import outrider
from exports import Recorder
from gguf_hybrids import add_module
from heads import DECODER, HEAD_SIZE, TOKENS, config_of, tensors_of
from outrider.bundle import Bundle
from outrider.bundle.manifest import Geometry
from outrider.cli import run
from outrider.drafters import HiddenModel
from outrider.errors import ExportError, OptionError
from outrider.system import saved
from outrider_export import export_bundle
from outrider_export.bundles.bundle_cache import BundleCache
from outrider_export.bundles.cached import cached_bundle
from outrider_export.bundles.find_draft import find_draft
from outrider_export.heads import own
from outrider_export.heads.own import OwnModule
from outrider_export.sources.gguf_reader import read_header
from outrider_export.sources.source import Located, locate
from qwen_module import qwen_module, write_qwen
from tiny import finish_gguf, write_checkpoint

ANSWER: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
PROMPT = "def quicksort(items):\n    if len(items) <= 1:\n        return items\n"
GEOMETRY = Geometry("qwen3_5_text", 4, 4, 2, HEAD_SIZE, DECODER["hidden_size"], 512, 448)


def write_main(folder: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> Path:
    """The tiny checkpoint with a module in its files. change: of the module's tensors, in place."""
    write_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "intermediate_size": 128}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    module = tensors_of("mtp")
    if change is not None:
        change(module)
    save_file(load_file(folder / "model.safetensors") | module, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_main(tmp_path_factory.mktemp("own") / "main")


@pytest.fixture(scope="module")
def exported(main: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, list[str]]:
    told = Recorder()
    made = export_bundle(
        main,
        output=tmp_path_factory.mktemp("exported") / "bundle",
        draft_vocab=200,
        draft_weights="fp32",
        progress=told,
    )
    return made, told.notes


def test_it_comes_along(exported: tuple[Bundle, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    bundle, notes = exported
    [entry] = bundle.manifest.drafters
    assert (entry.name, entry.kind, entry.features) == ("mtp", "mtp", ("last_hidden_state",))
    assert (entry.num_proposed_tokens, entry.model.source.id) == (200, bundle.manifest.main.source.id)
    assert "Its own MTP module comes along as drafter 'mtp'. --draft none leaves it out." in notes
    bundle.check_hashes()
    assert run(["inspect", str(bundle.folder)]) == 0
    assert "padded to 200" not in (shown := capsys.readouterr().out)
    assert "proposes 200 of its tokens" in " ".join(shown.split())


def test_it_can_be_left_out(main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "FOLDER", tmp_path / "cache")
    with_it, without = cached_bundle(main, progress=Recorder()), cached_bundle(main, "none", progress=Recorder())
    assert [len(each.manifest.drafters) for each in (with_it, without)] == [1, 0]
    assert with_it.folder != without.folder
    assert not without.folder.name.startswith("main-pair")
    with pytest.raises(OptionError, match="are for a draft model, and none is named"):
        export_bundle(main, "none", output=tmp_path / "none", draft_vocab=100)


def test_auto_looks_no_further(main: Path, tmp_path: Path) -> None:
    told = Recorder()
    assert find_draft(main, BundleCache(tmp_path), told) is None
    assert told.notes == ["--draft auto takes the MTP module that the model's own files have."]


def drop_norm(module: dict[str, Any]) -> None:
    del module["mtp.norm.weight"]


def add_layer(module: dict[str, Any]) -> None:
    module["mtp.layers.1.input_layernorm.weight"] = np.zeros(64, np.float32)


@pytest.mark.parametrize(("change", "said"), [
    (add_layer, "has an MTP module with 2 layers, which cannot be its drafter here. It is left out."),
    (drop_norm, "The model's own MTP module is left out. main does not fit as a drafter of kind mtp: The drafter "
     "has no weights 'norm.weight'"),
])  # fmt: skip
def test_one_that_cannot_draft_is_left_out(change: Any, said: str, tmp_path: Path) -> None:
    told = Recorder()
    made = export_bundle(write_main(tmp_path / "main", change), output=tmp_path / "bundle", progress=told)
    assert not made.manifest.drafters
    assert not (made.folder / "mtp").exists()
    made.check_hashes()
    assert any(said in note for note in told.notes)


# ── of the families' own layout


def test_qwen_drafts_with_its_own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft is what Transformers' layers make of the main model's hidden states, from the first round on."""
    seen: list[tuple[list[int], list[int]]] = []
    propose = HiddenModel.propose

    def spy(self: HiddenModel, requests: Any) -> Any:
        drafts = propose(self, requests)
        seen.extend(
            ([*each.sequence.token_ids], [*made.token_ids]) for each, made in zip(requests, drafts, strict=True)
        )
        return drafts

    monkeypatch.setattr(HiddenModel, "propose", spy)
    model = write_qwen(tmp_path / "main")
    made = export_bundle(tmp_path / "main", output=tmp_path / "bundle", weights="fp32", draft_weights="fp32")
    with outrider.load(made.folder, cache_size=0.02) as engine:
        options = {"drafter": "mtp", "num_assistant_tokens": 3, **ANSWER, "max_new_tokens": 12}
        drafted = engine.generate(PROMPT, **options)
        assert drafted.token_ids == engine.generate(PROMPT, **{**options, "drafter": None}).token_ids
    assert len(seen) > 4
    matrix = model.get_output_embeddings().weight.detach()
    for token_ids, draft in (seen[0], seen[1], seen[-2]):
        with torch.no_grad():
            hidden = model.model(torch.tensor([token_ids[:-1]])).last_hidden_state[0]
        expected = token_ids[1:]
        for _ in draft:
            logits, following = qwen_module(torch.tensor(expected), hidden, (matrix, matrix))
            expected, hidden = [*expected, int(logits[-1, :TOKENS].argmax())], torch.cat([hidden, following[-1:]])
        assert draft == expected[len(token_ids) - 1 :]


def write_module(folder: Path, kind: str = "mtp qwen", **changed: tuple[int, ...] | None) -> OwnModule:
    """A module of Qwen3.5, in a checkpoint. changed: the shapes of tensors, None for those that are not there."""
    folder.mkdir()
    module, config = tensors_of(kind), config_of(kind)
    for name, shape in changed.items():
        del module[full := f"mtp.{name}.weight"]
        if shape is not None:
            module[full] = np.zeros(shape, np.float32)
    save_file(module, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return OwnModule(folder, None, config, {name.removeprefix("mtp."): name for name in module})


def write_module_gguf(path: Path, kind: str = "mtp qwen", blocks: int = 5) -> Located:
    """The same in a GGUF file, as llama.cpp's converter writes it: norms have their whole weights."""
    text = config_of(kind)["text_config"]
    has_experts = "num_experts" in text
    writer = gguf.GGUFWriter(path, "qwen35moe" if has_experts else "qwen35")
    writer.add_block_count(blocks)
    writer.add_embedding_length(64)
    if has_experts:
        writer.add_expert_count(text["num_experts"])
        writer.add_expert_used_count(text["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(text["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(text["shared_expert_intermediate_size"])
    else:
        writer.add_feed_forward_length(DECODER["intermediate_size"])
    writer.add_head_count(DECODER["num_attention_heads"])
    writer.add_key_length(HEAD_SIZE)
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(DECODER["rms_norm_eps"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HEAD_SIZE // 2)
    add_module(writer, tensors_of(kind), 4)
    finish_gguf(writer)
    return locate(path)


@pytest.mark.parametrize("kind", ["mtp qwen", "mtp experts"])
def test_a_gguf_file_has_what_its_checkpoint_has(kind: str, tmp_path: Path) -> None:
    source = write_module_gguf(tmp_path / "model.gguf", kind)
    header = read_header(source.fetched)
    assert header.num_layers == 4
    of_file = OwnModule(source.fetched, header, {}, own._gguf_names(header)).read(GEOMETRY)
    of_folder = write_module(tmp_path / "main", kind).read(GEOMETRY)
    assert of_file.numbers == pytest.approx(of_folder.numbers)
    assert (of_file.num_kv_heads, of_file.head_size, of_file.context_length) == (2, HEAD_SIZE, 512)
    assert of_file.tensors.keys() == of_folder.tensors.keys()
    for name, values in of_folder.tensors.items():
        np.testing.assert_allclose(of_file.tensors[name], values, atol=1e-6)


def apart(tensors: dict[str, Any]) -> dict[str, Any]:
    """Experts as Qwen3-Next has them: each with tensors of its own."""
    made, prefix = dict(tensors), "mtp.layers.0.mlp.experts"
    both, down = made.pop(f"{prefix}.gate_up_proj"), made.pop(f"{prefix}.down_proj")
    for i, parts in enumerate(zip(*np.split(both, 2, axis=1), down, strict=True)):
        for part, values in zip(("gate", "up", "down"), parts, strict=True):
            made[f"{prefix}.{i}.{part}_proj.weight"] = np.ascontiguousarray(values)
    return made


def test_experts_may_have_a_tensor_each(tmp_path: Path) -> None:
    of_one = write_module(tmp_path / "one", "mtp experts").read(GEOMETRY)
    module = apart(tensors_of("mtp experts"))
    save_file(module, tmp_path / "one" / "model.safetensors")
    names = {name.removeprefix("mtp."): name for name in module}
    found = OwnModule(tmp_path / "one", None, config_of("mtp experts"), names).read(GEOMETRY)
    assert found.tensors.keys() == of_one.tensors.keys()
    assert all(np.array_equal(found.tensors[name], values) for name, values in of_one.tensors.items())
    del names["layers.0.mlp.experts.3.up_proj.weight"]
    with pytest.raises(ExportError, match="experts differ in .*up_proj.weight, or some are missing"):
        OwnModule(tmp_path / "one", None, config_of("mtp experts"), names).read(GEOMETRY)


@pytest.mark.parametrize(("changed", "said"), [
    ({"layers.0.self_attn.q_proj": (64, 64)}, r"'layers.0.self_attn.q_proj.weight' is float32 \[64, 64\], and "
     r"has to be of floats \[128, 64\]"),
    ({"fc": (64, 64)}, r"'fc.weight' is float32 \[64, 64\], and has to be of floats \[64, 128\]"),
    ({"norm": None}, r"'norm.weight' is missing, .* or leave the module out: --draft none"),
])  # fmt: skip
def test_one_that_does_not_fit_is_one_line(changed: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=said):
        write_module(tmp_path / "main", **changed).read(GEOMETRY)


def test_a_file_of_modules_alone_is_refused(tmp_path: Path) -> None:
    source = write_module_gguf(tmp_path / "model.gguf", blocks=1)
    with pytest.raises(ExportError, match="has 1 blocks, and 1 of them are MTP modules"):
        assert read_header(source.fetched).num_layers
