"""The demo's drafter: small enough for the repository, made for the demo's model, and used there."""

import json
from pathlib import Path

import pytest

import outrider
from outrider.bundle import read_bundle
from outrider.cli.demo import PROMPTS, demo_bundle
from outrider_export import extras
from outrider_export.bundles.demo_model import DRAFTER, FILE
from outrider_export.heads.packed import PACKED_NAME


def test_the_drafter_is_small_and_says_how_it_was_made() -> None:
    assert sum(path.stat().st_size for path in DRAFTER.iterdir()) <= 6_000_000
    training = json.loads((DRAFTER / "training.json").read_text(encoding="utf-8"))
    card = (DRAFTER / "README.md").read_text(encoding="utf-8")
    assert training["recipe"] in card
    assert "apache-2.0" in card
    assert json.loads((DRAFTER / PACKED_NAME).read_bytes())["entry"]["kind"] == training["kind"]


def test_it_drafts_for_the_demo_and_the_text_is_the_same(smollm2_drafted: Path) -> None:
    entry = read_bundle(smollm2_drafted).manifest.drafters[0]
    with outrider.load(smollm2_drafted, drafter=entry.name, max_new_tokens=32) as engine:
        for prompt in PROMPTS.values():
            plain = engine.generate(prompt, drafter=None)
            drafted = engine.generate(prompt, num_assistant_tokens=2)
            assert drafted.token_ids == plain.token_ids
            assert drafted.stats.num_accepted_tokens > 0
            words = plain.text.split()  # a loop would be fast, and say nothing
            assert len({*zip(words, words[1:], words[2:], strict=False)}) > 0.8 * (len(words) - 2)


def test_it_is_made_without_the_extra_once(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda package: False)
    (tmp_path / FILE).symlink_to(smollm2.parents[1] / FILE)
    bundle = read_bundle(demo_bundle(tmp_path, quiet=True))
    assert [each.kind for each in bundle.manifest.drafters] == ["eagle3"]
    monkeypatch.setattr("outrider_export.export_bundle", lambda *_, **__: pytest.fail("it is made again"))
    assert demo_bundle(tmp_path, quiet=True) == bundle.folder
