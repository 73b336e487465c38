"""A tiny random Whisper with draft models as Distil-Whisper is one: fewer layers in the decoder, one encoder or two."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import outrider
from encoder_decoders import SAMPLED, cut_decoder, hush_last_layer, shake_encoder, tone, write_whisper
from outrider.cli import run
from outrider.decoding.results import Transcription
from outrider.engine.engine import Engine
from outrider.errors import ExportError


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoints") / "whisper"
    write_whisper(folder, change=hush_last_layer)
    return folder


def distil(model: Any) -> None:
    hush_last_layer(model)
    cut_decoder(model)


def distil_all(model: Any) -> None:
    distil(model)
    shake_encoder(model)


@pytest.fixture(scope="module", params=["shared", "own"])
def listener(request: pytest.FixtureRequest, convert: Any, whisper: Path) -> Iterator[Engine]:
    """A Whisper, and a draft model with half its decoder that shares its encoder or has its own."""
    draft = whisper.with_name(f"distil-{request.param}")
    write_whisper(draft, change=distil if request.param == "shared" else distil_all)
    bundle, _ = convert(whisper, draft, weights="fp32", draft_weights="fp32")
    with outrider.load(bundle.folder) as engine:
        yield engine


def is_shared(engine: Engine) -> bool:
    return not (engine.bundle.folder / "draft-encoder").exists()


def token_ids_of(found: Transcription) -> list[list[int]]:
    return [window.token_ids for window in found.windows]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, SAMPLED], ids=str)
@pytest.mark.parametrize("without_timestamps", [False, True])
def test_drafted_is_plain(listener: Engine, without_timestamps: bool, options: dict[str, Any]) -> None:
    """With timestamps, too, by which a window's begin follows from the tokens of the one before."""
    assert listener.main.capabilities.bit_exact_batching
    common: dict[str, Any] = {"without_timestamps": without_timestamps, "max_new_tokens": 60, **options}
    seconds = 4 if without_timestamps else 32
    plain = listener.transcribe(tone(seconds), drafter=None, **common)
    for count in (1, 8):
        found = listener.transcribe(tone(seconds), drafter="draft", num_assistant_tokens=count, **common)
        assert token_ids_of(found) == token_ids_of(plain)
        assert (found.language, found.segments, found.text) == (plain.language, plain.segments, plain.text)
        for window, expected in zip(found.windows, plain.windows, strict=True):
            assert window.exact
            stats = window.stats
            accepted = sum(stats.num_accepted_tokens_per_position)
            assert stats.num_accepted_tokens == accepted <= stats.num_draft_tokens
            assert max(stats.num_draft_tokens_per_round, default=0) <= count
            assert stats.num_generated_tokens == len(window.token_ids)
            # The first token comes with the prompt; after the last, an accepted token's row may be left over.
            assert stats.num_rounds + stats.num_accepted_tokens - (stats.num_generated_tokens - 1) in (0, 1)
            assert stats.num_rounds <= expected.stats.num_rounds
            assert not expected.stats.num_draft_tokens
        assert sum(window.stats.num_accepted_tokens for window in found.windows)
    copies: list[dict[str, Any]] = [{"drafter": name, "num_assistant_tokens": 3} for name in ("suffix", "ngram")]
    others = [listener.transcribe(tone(seconds), **common, **drafter) for drafter in ({}, *copies)]
    assert [token_ids_of(each) for each in others] == [token_ids_of(plain)] * 3
    assert others[1].windows[0].stats.num_draft_tokens


def test_an_encoder_runs_once_a_window(listener: Engine) -> None:
    main, draft = (listener.loaded[role].backend.encoder for role in ("main", "draft"))  # type: ignore[attr-defined]
    before = main.num_runs, draft.num_runs
    options: dict[str, Any] = {"max_new_tokens": 8, "without_timestamps": True, "temperature": (0.0, 0.5)}
    found = listener.transcribe(tone(40), drafter="draft", **options)  # the language's request is another one
    assert main.num_runs - before[0] == len(found.windows) == 2
    assert draft.num_runs - before[1] == (0 if is_shared(listener) else 2)


def test_inspect_says_whose_encoder_it_is(listener: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(listener.bundle.folder)]) == 0
    said = capsys.readouterr().out.split()  # words: columns are as wide as the folders' names leave room for
    assert ("model's" in said) == is_shared(listener)
    assert ("draft-encoder/," in said) == (not is_shared(listener))
    roles = ("main", "draft")
    assert [listener.loaded[role].backend.num_layers for role in roles] == [2, 1]


def test_other_features_are_refused(whisper: Path, tmp_path: Path) -> None:
    from outrider_export import export_bundle

    write_whisper(tmp_path / "wide", num_mel_bins=128)
    with pytest.raises(ExportError, match="cannot draft for whisper: it reads other audio features"):
        export_bundle(whisper, tmp_path / "wide", output=tmp_path / "out")
