"""The default size of a draft model's output matrix: which tokens are kept in which language, and whether it pays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exports import Recorder, check_answers
from outrider.errors import DeviceError
from outrider_export import export_bundle
from outrider_export.bundles import export
from outrider_export.describe.draft_costs import DraftCosts
from outrider_export.diet import draft_cut
from outrider_export.diet.draft_cut import AutomaticCut
from outrider_export.diet.usual_tokens import TokenUsage, read_texts, script_of
from outrider_export.tokenizers.vocabulary import Vocabulary

KEPT: dict[str, Any] = {"weights": "keep", "draft_weights": "keep"}
DEAR, CHEAP = DraftCosts({1: 10.0, 8: 11.0}, {1: 1.0, 600: 4.0}), DraftCosts({1: 10.0, 8: 11.0}, {1: 3.9, 600: 4.0})

LATIN = [f"word{i}" for i in range(500)]
HAN = [chr(0x4E00 + i) for i in range(100)]
VOCABULARY = Vocabulary((*LATIN, *HAN), ())


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_cut, "SIZES", (100, 200))


@pytest.mark.parametrize(("text", "script"), [
    (" the", "LATIN"), (" für", "LATIN BEYOND ASCII"), ("的时候", "CJK"), ("です", "HIRAGANA"), (" на", "CYRILLIC"),
    ("한국", "HANGUL"), ("में", "DEVANAGARI"), ("\n\n", "SPACE"), (" 123", "DIGIT"), ("();", "ASCII"), ("。", "SYMBOL"),
])  # fmt: skip
def test_tokens_have_scripts(text: str, script: str) -> None:
    assert script_of(text.encode()) == script
    assert script_of(b"\xe6\x9c") == "PART"


def test_texts_are_in_many_languages() -> None:
    texts = read_texts()
    assert {"en", "code", "zh", "de", "ar", "ja", "ru", "ko", "hi"} <= {*texts}
    assert all(len(text.encode()) > 400 for text in texts.values())


def test_each_script_has_its_own_ranks() -> None:
    """Its first tokens come before the late ones of a larger script with lower ids."""
    nothing = {"en": np.zeros((2, 600))}
    best = np.argsort(-TokenUsage(VOCABULARY, nothing, nothing).scores())[:100]
    assert {*range(20), *range(500, 510)} <= {*best.tolist()}


def usage(*languages: list[int]) -> TokenUsage:
    """Languages whose tokens are expected alike in both halves of their texts."""
    counts = {
        str(number): np.tile(np.bincount(ids, minlength=600) * 1.0, (2, 1)) for number, ids in enumerate(languages)
    }
    return TokenUsage(VOCABULARY, counts, counts)


def test_what_a_text_expects_is_kept() -> None:
    found = usage([450, 451, 590], [452])
    assert {450, 451, 452, 590} <= {*np.argsort(-found.scores())[:20].tolist()}
    kept = found.kept(lambda scores: np.argsort(-scores)[:20].astype(np.int32))
    assert kept == {"0": 1.0, "1": 1.0}
    halves = {"en": np.zeros((2, 600))}
    halves["en"][0, 450], halves["en"][1, 451] = 1, 3
    apart = TokenUsage(VOCABULARY, halves, halves)  # what a half expects is not what the other one chooses
    assert apart.kept(lambda scores: np.argsort(-scores)[:20].astype(np.int32)) == {"en": 0.0}


def cut(costs: DraftCosts) -> AutomaticCut:
    return AutomaticCut(VOCABULARY, np.arange(600, dtype=np.int32), np.array([555, 599], np.int32), costs)


def test_a_dear_matrix_is_cut(small_sizes: None) -> None:
    progress = Recorder()
    chosen = cut(DEAR).choose_by(lambda: usage([450, 451], [590]), progress)
    assert chosen is not None
    assert len(chosen) == 100
    assert {450, 451, 555, 590, 599} <= {*chosen.tolist()}
    assert progress.notes == [
        "draft vocabulary: 100 of 600 tokens keep 100% of the drafts that are accepted (0: 100%); a draft token takes "
        "0.37 of its time, by the bytes that it reads. --draft-vocab all keeps all."
    ]


def test_a_cheap_matrix_is_not_measured(small_sizes: None) -> None:
    progress = Recorder()
    assert cut(CHEAP).choose_by(lambda: pytest.fail("measured"), progress) is None
    assert "With 100, a draft token would take 0.98 of its time" in progress.notes[0]


def test_no_language_pays_for_others(small_sizes: None) -> None:
    """Of one, hardly any token is kept."""
    progress, others = Recorder(), [[450, 451]] * 9
    found = usage(*others, [*range(100, 500)])
    assert cut(DEAR).choose_by(lambda: found, progress) is None
    assert "tokens. 100 would keep 90% of the drafts that are accepted (9: 2%)" in progress.notes[0]
    assert cut(DEAR).choose_by(lambda: usage(*others), progress) is not None


def test_a_model_that_cannot_be_run_is_not_cut(small_sizes: None) -> None:
    def fail() -> TokenUsage:
        raise DeviceError("no kernel")

    progress = Recorder()
    assert cut(DEAR).choose_by(fail, progress) is None
    assert progress.notes == ["draft vocabulary: all 600 tokens, as the model cannot be run: no kernel"]


def test_costs_follow_the_bytes() -> None:
    costs = DraftCosts.of_bytes(1000.0, 400.0, width=600, row_bytes=0.5)
    assert costs.of_draft(600) == 400
    assert costs.of_draft(300) == pytest.approx(250, abs=1)
    assert costs.speed(300) > costs.speed(600) > costs.speed(600, 0.9)
    at_once = DraftCosts.of_bytes(1000.0, 400.0, width=600, row_bytes=0.5, at_once=True)
    assert at_once.speed(600) > costs.speed(600)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("format", ["openvino", "onnx"])
def test_an_exported_draft_model_is_run_and_cut(
    format: str,  # noqa: A002
    tied: Path,
    gguf_file: Path,
    tmp_path: Path,
    small_sizes: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text stays the main model's. `--draft-vocab all` overrules."""
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    monkeypatch.setattr(draft_cut, "_LEAST_GAIN", 0.0)
    monkeypatch.setattr(draft_cut, "_MOST_LOST", 0.0)
    options = KEPT if format == "openvino" else {"format": format}
    model, progress = gguf_file if format == "openvino" else tied, Recorder()
    bundle = export_bundle(model, model, output=tmp_path / "b", progress=progress, **options)
    (drafter,) = bundle.manifest.drafters
    assert drafter.num_proposed_tokens == len(bundle.read_proposed(drafter)) in (100, 200)
    assert {400, 401, 402, 403} <= {*bundle.read_proposed(drafter).tolist()}  # special
    assert "of the drafts that are accepted" in progress.notes[-1]
    assert "count draft" in progress.phases
    check_answers(bundle.folder, "def quicksort")
    if format == "openvino":
        whole = export_bundle(model, model, output=tmp_path / "whole", draft_vocab="all", **options)
        assert whole.manifest.drafters[0].num_proposed_tokens is None


def test_measured_costs_decide(tied: Path, tmp_path: Path, small_sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the form that this machine chose."""
    measured = DraftCosts({1: 1.0, 8: 1.0}, {100: 0.1, 404: 0.4}, measured=True)

    def choose(plans: list[Any], *_: object) -> list[Any]:
        return [plans[0], replace(plans[1], costs=measured)]

    monkeypatch.setattr(export, "choose_forms", choose)
    monkeypatch.setattr(draft_cut, "_MOST_LOST", 0.0)
    monkeypatch.setattr(draft_cut, "_LEAST_GAIN", 0.0)
    progress = Recorder()
    export_bundle(tied, tied, output=tmp_path / "b", progress=progress)
    assert "of its time, measured. " in progress.notes[-1]
