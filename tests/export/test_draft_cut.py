"""The default size of a draft model's output matrix: which tokens are kept, and whether it pays."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from exports import Recorder, check_answers
from outrider_export import export_bundle
from outrider_export.diet import diet, draft_cut
from outrider_export.diet.draft_cut import AutomaticCut
from outrider_export.diet.usual_tokens import read_texts, score_tokens, script_of
from outrider_export.tokenizers.vocabulary import Vocabulary

KEPT: dict[str, Any] = {"weights": "int4", "draft_weights": "int4"}

LATIN = [f"word{i}" for i in range(500)]
HAN = [chr(0x4E00 + i) for i in range(100)]
VOCABULARY = Vocabulary((*LATIN, *HAN), ())


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
    best = np.argsort(-score_tokens(VOCABULARY, lambda _: []))[:100]
    assert {*range(20), *range(500, 510)} <= {*best.tolist()}


def cut(row_share: float, num_tokens: int = 100) -> AutomaticCut:
    required = np.array([555, 599], np.int32)
    return AutomaticCut(VOCABULARY, np.arange(600, dtype=np.int32), required, num_tokens, row_share)


@pytest.mark.parametrize(("row_share", "num_tokens", "is_cut"), [
    (1 / 1000, 100, True), (1 / 6000, 100, False), (1 / 1000, 500, False), (1 / 1000, 4, False),
])  # fmt: skip
def test_a_matrix_is_cut_where_that_saves_a_tenth(
    row_share: float, num_tokens: int, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a vocabulary that is hardly larger, nor where special tokens leave no room. Tokens of texts are kept."""
    monkeypatch.setattr(draft_cut, "Tokenizer", lambda _: SimpleNamespace(encode=lambda _: [450, 451, 590]))
    progress = Recorder()
    chosen = cut(row_share, num_tokens).choose(Path(), progress)
    if not is_cut:
        assert (chosen, progress.notes) == (None, [])
        return
    assert chosen is not None
    assert len(chosen) == 100
    assert {450, 451, 555, 590, 599} <= {*chosen.tolist()}
    assert progress.notes == [
        "draft vocabulary: 100 of 600 tokens; a draft token takes 0.50 of its time, by the bytes that it reads. "
        "--draft-vocab all keeps all."
    ]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("format", ["openvino", "onnx"])
def test_an_exported_draft_model_is_cut(
    format: str,  # noqa: A002
    untied: Path,
    gguf_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text stays the main model's. `--draft-vocab all` overrules. A matrix of its own is never written whole."""
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    monkeypatch.setattr(diet, "this_machine", lambda: SimpleNamespace(draft_vocab=200))
    monkeypatch.setattr(draft_cut, "_LEAST_SAVED", 0.0)
    options = KEPT if format == "openvino" else {"format": format}
    model, progress = gguf_file if format == "openvino" else untied, Recorder()
    bundle = export_bundle(model, model, output=tmp_path / "b", progress=progress, **options)
    (drafter,) = bundle.manifest.drafters
    assert drafter.num_proposed_tokens == len(bundle.read_proposed(drafter)) == 200
    assert {400, 401, 402, 403} <= {*bundle.read_proposed(drafter).tolist()}  # special
    assert any(note.startswith("draft vocabulary: 200 of 404 tokens") for note in progress.notes)
    check_answers(bundle.folder, "def quicksort")
    if format == "openvino":
        whole = export_bundle(model, model, output=tmp_path / "whole", draft_vocab="all", **options)
        assert whole.manifest.drafters[0].num_proposed_tokens is None
