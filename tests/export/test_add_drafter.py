"""Drafters that read hidden states are added to bundles, and draft there; what does not fit changes nothing."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import openvino as ov
import pytest

import outrider
from exports import content
from heads import KINDS, NUM_PLACES, TOKEN_MAP, tensors_of, write_head
from outrider.bundle import read_bundle
from outrider.cli import drafter_costs, run
from outrider.drafters.prediction import Costs, needed, predict
from outrider.errors import ExportError, OptionError, OutriderError
from outrider.models.backends.heads.weights import HeadWeights
from outrider_export import target
from outrider_export.bundles.drafters import add_drafter
from outrider_export.diet import diet
from outrider_export.heads import container
from outrider_export.heads.formats import read_head

PROMPT = "def quicksort(items):\n    if len(items) <= 1:\n        return items\n" * 3
ANSWER: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "num_assistant_tokens": 4}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}


SOME = ("eagle3", "dflash")  # one of each kind of backend; a bundle of all takes ten seconds to load
ALL = (*KINDS, "dflash2")


@pytest.fixture(scope="module", params=[SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def engine(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> outrider.Engine:
    """With several drafters."""
    root = tmp_path_factory.mktemp("added")
    shutil.copytree(tiny, root / "bundle")
    for kind in request.param:
        add_drafter(root / "bundle", write_head(root / kind, kind), name=kind.replace(" ", "-"))
    return outrider.load(root / "bundle", cache_size=0.02)


def test_texts_are_those_of_plain_decoding(engine: outrider.Engine) -> None:
    for options in ({}, SAMPLED):
        plain = engine.generate(PROMPT, drafter=None, **ANSWER, **options)
        longer = [*engine.tokenizer.encode(PROMPT), *plain.token_ids, 5]  # begins with what is in the cache
        plain_longer = engine.generate(longer, drafter=None, **ANSWER, **options)
        for entry in engine.bundle.manifest.drafters:
            drafted = engine.generate(PROMPT, drafter=entry.name, **ANSWER, **options)
            assert drafted.token_ids == plain.token_ids
            assert drafted.stats.num_draft_tokens >= drafted.stats.num_drafts > 3
            drafted = engine.generate(longer, drafter=entry.name, **ANSWER, **options)
            assert drafted.token_ids == plain_longer.token_ids
            assert drafted.stats.num_cached_tokens > 0


def test_several_answers_at_once_are_those_of_plain_decoding(engine: outrider.Engine) -> None:
    """Each with another drafter, which wants other hidden states, and two with one."""
    plain = engine.generate(PROMPT, drafter=None, **ANSWER)
    names = [entry.name for entry in engine.bundle.manifest.drafters]
    streams = [engine.stream(PROMPT, drafter=name, **ANSWER) for name in (*names, None, names[0])]
    for stream in streams:
        assert "".join(chunk.text for chunk in stream) == plain.text


def test_the_manifest_describes_them(engine: outrider.Engine) -> None:
    layers = ("hidden_states.0", "hidden_states.1", "hidden_states.2")
    features: dict[str, Any] = {"eagle3": layers, **dict.fromkeys(("dflash", "dflash2", "dspark"), layers[1:])}
    for entry in engine.bundle.manifest.drafters:
        assert entry.features == features.get(entry.kind, ("last_hidden_state",))
        assert entry.num_proposed_tokens == (len(TOKEN_MAP) if entry.kind == "eagle3" else None)
        assert entry.num_places == (None if entry.kind in ("eagle3", "mtp") else NUM_PLACES)
    engine.bundle.check_hashes()


def spoils(kind: str, name: str, change: Callable[[bytes], bytes | None]) -> Any:
    """A checkpoint with one file that is changed, or not there."""

    def write(folder: Path) -> dict[str, Any]:
        path = write_head(folder, kind) / name
        changed = change(path.read_bytes())
        path.unlink() if changed is None else path.write_bytes(changed)
        return {}

    return write


def writes(kind: str, tensors: Any = None, options: dict[str, Any] | None = None, **changes: Any) -> Any:
    def write(folder: Path) -> dict[str, Any]:
        write_head(folder, kind, tensors() if tensors else None, **changes)
        return options or {}

    return write


def without(kind: str, name: str) -> Callable[[], Any]:
    return lambda: {key: values for key, values in tensors_of(kind).items() if key != name}


def changed(kind: str, **changes: Any) -> Callable[[], Any]:
    return lambda: tensors_of(kind) | changes


# How a checkpoint and options are made, and what is said: of options an of checkpoints an ExportError.
WRONG: dict[str, tuple[Any, str]] = {
    "no config.json": (
        spoils("mtp", "config.json", lambda _: None),
        "is no drafter of a kind that is known: assistant, dflash, dflash2, dspark, eagle3",
    ),
    "config.json is damaged": (spoils("mtp", "config.json", lambda _: b"{"), "config.json cannot be read"),
    "config.json lacks a number": (
        writes("mtp", num_attention_heads=None),
        "config.json has no 'num_attention_heads', which mtp",
    ),
    "config.json has no number": (writes("mtp", hidden_size="many"), "config.json is damaged: .*many"),
    "no dflash_config": (writes("dflash", dflash_config=None), "has no dflash_config"),
    "no mask": (writes("dflash", dflash_config={"target_layer_ids": [0]}), "has no dflash_config with .*mask_token_id"),
    "no such layer": (
        writes("dflash", dflash_config={"target_layer_ids": [0, 9], "mask_token_id": 1}),
        "reads hidden states 'hidden_states.10', and the main model's graph has hidden_states.0 to hidden_states.2",
    ),
    "damaged tensors": (
        spoils("eagle3", "model.safetensors", lambda content: content[:-4000]),
        "model.safetensors is missing or damaged",
    ),
    "no tensors": (spoils("mtp", "model.safetensors", lambda _: None), r"has no \*.safetensors"),
    "a tensor is missing": (
        writes("mtp", without("mtp", "mtp.layers.0.mlp.up_proj.weight")),
        "does not fit as a drafter of kind mtp: The drafter has no weights 'layers.0.mlp.up_proj.weight'",
    ),
    "a tensor of another shape": (
        writes("mtp", changed("mtp", **{"mtp.fc.weight": np.ones((64, 100), "f4")})),
        "does not fit as a drafter of kind mtp: .*MatMul",
    ),
    "other hidden size, mtp": (
        writes("mtp", lambda: tensors_of("mtp", hidden=48), hidden_size=48),
        "with hidden_size 48",
    ),
    "other hidden size, eagle3": (
        writes("eagle3", lambda: tensors_of("eagle3", hidden=48), hidden_size=48),
        "reads hidden states of 144 numbers, and 3 layers of this main model have 192",
    ),
    "fewer tokens than logits": (
        writes("eagle3", changed("eagle3", d2t=(TOKEN_MAP - np.arange(150))[:9])),
        "has 150 rows, and lists 9 tokens",
    ),
    "a token twice": (
        writes("eagle3", changed("eagle3", d2t=np.repeat(TOKEN_MAP[:75], 2) - np.arange(150))),
        "lists a token twice",
    ),
    "an unknown token": (writes("eagle3", changed("eagle3", d2t=np.arange(150) * 4)), "proposes tokens from 0 to 745"),
    "logits of another vocabulary": (
        writes("eagle3", without("eagle3", "d2t")),
        "for 150 tokens, and the main model has 404",
    ),
    "an unknown format": (writes("mtp", options={"weights": "int9"}), "weights='int9' .*int8"),
    "draft_vocab of a head with a matrix": (
        writes("eagle3", options={"draft_vocab": 100}),
        "draft_vocab is for drafters with",
    ),
    "draft_vocab too small": (writes("mtp", options={"draft_vocab": 2}), "draft_vocab=2 leaves no room"),
    **{
        f"name {name!r}": (writes("mtp", options={"name": name}), f"name='{name}' cannot be a drafter's")
        for name in ("main", "auto", "tokenizer", "../main", "a/b", "", "-x", "ein Name")
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_changes_nothing(folder: Path, tmp_path: Path, case: str) -> None:
    write, message = WRONG[case]
    before = content(tmp_path)
    options = write(tmp_path / "head")
    with pytest.raises(OptionError if options else ExportError, match=message) as raised:
        add_drafter(folder, tmp_path / "head", **options)
    assert "Traceback" not in str(raised.value)
    shutil.rmtree(tmp_path / "head")
    assert content(tmp_path) == before


def test_a_name_is_taken_once(folder: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", "mtp")
    add_drafter(folder, head)
    add_drafter(folder, head, name="another")
    before = content(folder)
    for name in (None, "mtp", "another"):
        with pytest.raises(OptionError, match="The bundle has a drafter .* already"):
            add_drafter(folder, head, name=name)
    assert content(folder) == before
    assert [entry.name for entry in read_bundle(folder).manifest.drafters] == ["mtp", "another"]


def test_a_copy_has_it_in_place_of_others(folder: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", "mtp")
    add_drafter(folder, head)
    add_drafter(folder, head, name="another")
    before = content(folder)
    made = add_drafter(folder, head, output=tmp_path / "copy", replaced=["mtp"])
    assert [entry.name for entry in made.manifest.drafters] == ["another", "mtp"]
    made = add_drafter(folder, head, name="new", output=tmp_path / "copy", replaced=["mtp", "another"])
    assert made.folder == tmp_path / "copy"
    assert {name.split("/")[0] for name in content(made.folder)} == {"main", "tokenizer", "new", "outrider.json"}
    assert content(folder) == before


@pytest.mark.parametrize("failing", ["write_manifest", "list_files", "read_bundle"])
def test_what_fails_late_changes_nothing(
    folder: Path, tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old bundle's files are linked, and are not written to."""
    head, before = write_head(tmp_path / "head", "mtp"), content(folder)
    real = getattr(target, failing)

    def fail(*arguments: Any, **options: Any) -> Any:
        if failing == "write_manifest":
            real(*arguments, **options)
        raise OSError("the disk is full")

    monkeypatch.setattr(target, failing, fail)
    with pytest.raises(ExportError, match="cannot be written: the disk is full"):
        add_drafter(folder, head)
    assert content(folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "head"]


def test_other_files_are_linked(folder: Path, tmp_path: Path) -> None:
    inode = (folder / "main" / "openvino_model.bin").stat().st_ino
    before = content(folder)
    after = content(add_drafter(folder, write_head(tmp_path / "head", "mtp")).folder)
    assert (folder / "main" / "openvino_model.bin").stat().st_ino == inode or os.name == "nt"
    assert {path for path in {*before, *after} if before.get(path) != after.get(path)} == {
        "outrider.json", "mtp/openvino_model.xml", "mtp/openvino_model.bin",
    }  # fmt: skip


def test_what_is_no_checkpoint_is_said(folder: Path, tmp_path: Path) -> None:
    before = content(folder)
    for source in (tmp_path / "none", folder / "outrider.json"):
        with pytest.raises(OutriderError, match=source.name):
            add_drafter(folder, source)
    assert content(folder) == before


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", ["mtp", "dflash", "dspark"])
def test_the_main_models_matrix_can_be_cut(folder: Path, tmp_path: Path, kind: str) -> None:
    """Its rows for the tokens that are proposed most; special tokens are among them."""
    head = write_head(tmp_path / kind, kind)
    add_drafter(folder, head, name="whole", weights="fp32", draft_vocab="all")
    bundle = add_drafter(folder, head, name="cut", weights="fp32", draft_vocab=300)
    whole, cut = bundle.manifest.drafters
    assert (whole.num_proposed_tokens, cut.num_proposed_tokens) == (None, 300)
    proposed = bundle.read_proposed(cut)
    assert {*bundle.manifest.tokenizer.special_token_ids} <= {*proposed.tolist()}
    rows = np.random.default_rng(0).standard_normal((9, 1, 64)).astype(np.float32)
    main = bundle.model_path(bundle.manifest.main)
    made = []
    for entry in (whole, cut):
        weights, given = (
            HeadWeights.read(ov.Core(), bundle.model_path(entry.model), main),
            ov.opset13.parameter([-1, 1, 64]),
        )
        graph = ov.Model([ov.opset13.result(weights.logits(given))], [given])
        hints = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
        made.append(ov.Core().compile_model(graph, "CPU", hints)([rows])[0][:, 0])
    np.testing.assert_allclose(made[1], made[0][:, proposed], atol=1e-4)


def test_a_head_proposes_the_machines_number_of_tokens(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it reads the main model's output matrix, and nobody says how many."""
    monkeypatch.setattr(diet, "this_machine", lambda: SimpleNamespace(draft_vocab=200))
    bundle = add_drafter(folder, write_head(tmp_path / "mtp", "mtp"))
    assert bundle.manifest.drafters[-1].num_proposed_tokens == 200


@pytest.mark.parametrize(("config", "layers"), [
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, (0, 1, 2)),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 46, 90]}}, (3, 47, 91)),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 47, 91)),
    ({}, (2, 47, 91)),
])  # fmt: skip
def test_the_layers_of_eagle3_are_numbered_in_two_ways(
    folder: Path, tmp_path: Path, config: dict[str, Any], layers: tuple[int, ...]
) -> None:
    """By layer, from 0, as SpecForge does, or by hidden states, as vLLM does."""
    geometry = msgspec.structs.replace(read_bundle(folder).manifest.main.geometry, num_layers=94)
    head = write_head(tmp_path / "head", "eagle3", **{"eagle_aux_hidden_state_layer_ids": None, **config})
    assert read_head(head, geometry).features == tuple(f"hidden_states.{i}" for i in layers)


@pytest.mark.parametrize(("weights", "largest"), [("fp32", 0.0), ("fp16", 5e-4), ("int8", 0.5 / 255 + 2e-3)])
def test_weights_are_compressed(tmp_path: Path, weights: str, largest: float) -> None:
    """largest: error of a weight, of its row's range. A row without negative numbers, and one of zeros, stay near."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(0, rng.uniform(0.001, 30, (80, 1)), (80, 96)).astype(np.float32)
    matrix[3], matrix[4], matrix[5] = 0, np.abs(matrix[4]) + 5, 1e-9
    tensors = {
        "fc.weight": matrix, "fc.bias": matrix[0], "small.weight": matrix[:8, :8], "rms_norm_eps": np.ones(1, "f4"),
    }  # fmt: skip
    container.write(tmp_path / "openvino_model.xml", tensors, weights)
    read = HeadWeights.read(ov.Core(), tmp_path / "openvino_model.xml", None)
    made: dict[str, Any] = {}
    for name in tensors:
        graph = ov.Model([ov.opset13.result(read[name])], [])
        hints = {"INFERENCE_PRECISION_HINT": "f32"}
        made[name] = ov.Core().compile_model(graph, "CPU", hints)([])[0]
    reach = np.maximum(matrix.max(1), 0) - np.minimum(matrix.min(1), 0)
    assert (np.abs(made["fc.weight"] - matrix).max(1) <= largest * reach + 1e-6).all()
    for name, rows in (("fc.weight", [7, 3, 79]), ("small.weight", [0, 5])):  # as they are read outside a graph
        np.testing.assert_allclose(read.table(name)[rows], made[name][rows], rtol=2e-3, atol=1e-6)
    np.testing.assert_array_equal(made["fc.bias"], matrix[0])
    np.testing.assert_array_equal(made["small.weight"], matrix[:8, :8])
    sizes = {"fp32": 4, "fp16": 2, "int8": 1}
    assert (tmp_path / "openvino_model.bin").stat().st_size < sizes[weights] * matrix.size + 2000


def test_the_command_says_what_the_drafter_costs_and_needs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = write_head(tmp_path / "head", "eagle3")
    (head / "training.json").write_text('{"held_out_acceptance_by_place": [1.0, 1.5]}', encoding="utf-8")
    assert run(["add", str(folder), str(head)]) == 1
    assert "training.json cannot be read: an acceptance is from 0 to 1" in capsys.readouterr().err
    assert not read_bundle(folder).manifest.drafters

    (head / "training.json").write_text('{"held_out_acceptance_by_place": [0.9, 0.8]}', encoding="utf-8")
    assert run(["add", str(folder), str(head), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    costs = Costs(**said["costs"])
    assert said["prediction"] == pytest.approx(asdict(predict([0.9, 0.8], costs)), rel=1e-4)
    assert said["needed_acceptance"] == needed(1.0, costs)

    assert run(["add", str(folder), str(head), "--name", "again"]) == 0
    printed = capsys.readouterr().out
    assert "tokens/round to pay" in printed
    assert "Predicted, not measured: " in printed

    monkeypatch.setattr(drafter_costs, "_QUICK", 0)
    assert run(["add", str(folder), str(write_head(tmp_path / "dflash", "dflash"))]) == 0
    printed = capsys.readouterr().out
    assert "measured at the first load" in printed
    assert f"outrider tune {folder} --drafter dflash" in printed
