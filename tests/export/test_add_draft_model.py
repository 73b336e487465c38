"""`outrider add` with a draft model: tiny random models."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.bundle import Bundle, read_bundle
from outrider.bundle.manifest import MANIFEST_NAME
from outrider.cli import run
from outrider.errors import ExportError, OptionError, VocabularyMismatch
from outrider_export import Silent, add_drafter
from outrider_export.bundles.drafters import is_model
from outrider_export.diet.diet import TRAINED_NAME

FIXED: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True, "num_assistant_tokens": 3}


@pytest.fixture
def pair(convert: Any, tied: Path, tmp_path: Path) -> Bundle:
    """A main model and a draft model, in a folder of their own."""
    bundle, _ = convert(tied, tied, weights="fp32", draft_weights="fp32")
    return read_bundle(shutil.copytree(bundle.folder, tmp_path / "pair"))


def test_a_second_draft_model_drafts_beside_the_first(pair: Bundle, make_checkpoint: Any, tmp_path: Path) -> None:
    small = shutil.copytree(make_checkpoint("one-layer", num_hidden_layers=1, seed=8), tmp_path / "small")
    proposed = [0, *range(20, 150), *range(400, 404)]
    (small / TRAINED_NAME).write_text(json.dumps({"token_ids": proposed}))
    before = {file.path: file.sha256 for file in pair.manifest.files}
    assert run(["add", str(pair.folder), str(small), "--name", "small", "--weights", "fp32"]) == 0
    made = read_bundle(pair.folder)
    first, second = made.manifest.drafters
    assert (first.name, second.name, second.kind, second.model.weights) == ("draft", "small", "draft_model", "fp32")
    assert second.num_proposed_tokens == len(proposed)
    assert made.read_proposed(second).tolist() == proposed
    after = {file.path: file.sha256 for file in made.manifest.files}
    assert {path for path in after if path not in before} == {path for path in after if path.startswith("small/")}
    assert {path: after[path] for path in before} == before
    asked: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 1}]
    with outrider.load(made.folder, cache_size=0.02) as engine:
        for options in asked:
            plain = engine.generate("def quicksort", drafter=None, **FIXED, **options)
            for name in ("draft", "small"):
                drafted = engine.generate("def quicksort", drafter=name, **FIXED, **options)
                assert drafted.token_ids == plain.token_ids
                assert drafted.stats.num_draft_tokens > 0


def test_defaults_are_those_of_an_exported_draft_model(convert: Any, tied: Path, tmp_path: Path) -> None:
    bundle, _ = convert(tied, weights="fp32")
    alone = shutil.copytree(bundle.folder, tmp_path / "alone")
    (entry,) = add_drafter(alone, tied, draft_vocab=200).manifest.drafters
    assert (entry.name, entry.model.weights, entry.num_proposed_tokens) == ("draft", "int8", 200)
    with pytest.raises(OptionError, match="has a drafter 'draft' already"):
        add_drafter(alone, tied)


def test_what_does_not_fit_is_refused_and_nothing_changes(
    pair: Bundle, make_checkpoint: Any, build_tokenizer: Any, tied: Path, tmp_path: Path
) -> None:
    manifest = (pair.folder / MANIFEST_NAME).read_bytes()
    other = make_checkpoint("other-tokens", tokenizer=build_tokenizer(350))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    cases: list[tuple[Path, dict[str, Any], type[Exception], str]] = [
        (other, {}, VocabularyMismatch, "has another vocabulary than .* Export both together: outrider export"),
        (tied, {"weights": "int3"}, OptionError, "weights='int3' is not a weight format"),
        (tied, {"draft_vocab": 2}, OptionError, "draft_vocab=2 leaves no room for text"),
        (tied, {"name": "auto"}, OptionError, "name='auto' cannot be a drafter's"),
        (empty, {}, ExportError, "empty"),
    ]
    for source, options, error, said in cases:
        with pytest.raises(error, match=said):
            add_drafter(pair.folder, source, progress=Silent(), **options)
    assert (pair.folder / MANIFEST_NAME).read_bytes() == manifest
    assert not list(pair.folder.parent.glob(".*partial*"))


@pytest.mark.parametrize(("config", "found"), [
    ({"architectures": ["Qwen2ForCausalLM"]}, True),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, False),
    ({"architectures": ["GPT2LMHeadModel"]}, True),
    ({"architectures": ["BertModel"]}, False),
    ({}, False),
])  # fmt: skip
def test_models_are_told_from_heads(config: dict[str, Any], found: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_model(tmp_path) is found
