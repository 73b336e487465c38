"""`--draft auto`: a drafter that fits is found, and the cheapest is taken."""

from pathlib import Path

import pytest

from exports import Recorder
from outrider.bundle import read_bundle
from outrider.cli import run
from outrider.engine.opening import open_bundle
from outrider.system import saved
from outrider_export.bundles import find_draft as module
from outrider_export.bundles.bundle_cache import BundleCache
from outrider_export.bundles.find_draft import find_draft, published_for
from outrider_export.sources.source import locate
from tiny import train_tokenizer, write_checkpoint, write_gguf


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A main model and a copy of it, two smaller ones, one of another vocabulary, a damaged one. No hub."""
    monkeypatch.setattr(module, "_hub_folders", dict)
    monkeypatch.setattr(module, "_is_reachable", lambda name: False)
    monkeypatch.setattr(saved, "FOLDER", tmp_path / "cache")
    folder = tmp_path / "models"
    for name, num_layers in (("main", 8), ("copy", 8), ("small", 2), ("smallest", 1), ("foreign", 1)):
        write_checkpoint(folder / "made" / name, num_layers=num_layers)
        if name == "foreign":
            train_tokenizer(text=["abc"]).save(str(folder / "made" / name / "tokenizer.json"))
        write_gguf(folder / f"{name}.gguf", folder / "made" / name, "Q8_0", "qwen2", {})
    (folder / "broken.gguf").write_bytes(b"GGUF")
    return folder


def test_the_cheapest_that_fits_is_taken(models: Path, tmp_path: Path) -> None:
    told = Recorder()
    assert find_draft(models / "main.gguf", BundleCache(tmp_path / "none"), told) == models / "smallest.gguf"
    (note,) = told.notes
    assert "smallest.gguf: a draft model" in note
    assert "the fastest one that fits. Also found: small.gguf." in note


def test_sources_of_bundles_and_the_hubs_cache_are_looked_at(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, told = tmp_path / "other", Recorder()
    other.mkdir()
    main = (models / "main.gguf").rename(other / "main.gguf")
    assert find_draft(main, BundleCache(saved.FOLDER), told) is None
    assert "has found no drafter" in told.notes[-1]
    monkeypatch.setattr(module, "_hub_folders", lambda: {"org/small": models / "small.gguf"})
    assert find_draft(main, BundleCache(saved.FOLDER), told) == models / "small.gguf"


def test_published_drafters_are_named_and_used_where_the_hub_is_reached(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Recorder()
    assert find_draft("Qwen/Qwen3-8B", BundleCache(saved.FOLDER), told) is None
    assert "AngelSlim/Qwen3-8B_eagle3 (eagle3)" in told.notes[-1]
    assert "not tested here" in told.notes[-1]
    monkeypatch.setattr(module, "_is_reachable", lambda name: name.startswith("Qwen/"))
    assert find_draft("Qwen/Qwen3-8B", BundleCache(saved.FOLDER), told) == "Qwen/Qwen3-0.6B"
    assert [each.id for each in published_for("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")] == [
        "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    ]
    assert published_for("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf") == []  # it is the smallest
    for _, drafters in module._table():
        assert all(locate(each.id).kind == "hub" for each in drafters)


def test_a_module_in_the_models_own_files_is_enough(models: Path, tmp_path: Path) -> None:
    told = Recorder()
    assert find_draft("Qwen/Qwen3.5-4B", BundleCache(saved.FOLDER), told) is None
    assert told.notes == ["--draft auto takes the MTP module that the model's own files have."]
    (tmp_path / "other").mkdir()
    main = (models / "main.gguf").rename(tmp_path / "other" / "Qwen3.5-4B-Q4_1.gguf")  # which was left out here
    assert find_draft(main, BundleCache(saved.FOLDER), told) is None
    assert "Published for this model, not tested here: z-lab/Qwen3.5-4B-DFlash (dflash)." in told.notes[-1]


@pytest.mark.slow
def test_a_bundle_is_made_with_the_drafter_that_was_found(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = open_bundle(models / "main.gguf", "auto", progress=Recorder())
    assert [each.model.source.id for each in bundle.manifest.drafters] == ["smallest.gguf"]
    assert open_bundle(bundle.folder, "auto").folder == bundle.folder  # it has its own
    assert run(["export", str(models / "main.gguf"), "--draft", "auto", "-o", str(tmp_path / "pair")]) == 0
    assert [each.model.source.id for each in read_bundle(tmp_path / "pair").manifest.drafters] == ["smallest.gguf"]
    assert "--draft auto chooses" in capsys.readouterr().err
