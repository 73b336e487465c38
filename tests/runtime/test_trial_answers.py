"""Short answers at a first load, which a draft model drafts."""

from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.drafters.controller.replay import ENOUGH_TOKENS
from outrider.engine import trial_answers


def load(bundle: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[outrider.Engine, list[str]]:
    """An engine, and what it has said, where a toy is slow enough to be tried."""
    monkeypatch.setattr(trial_answers, "_LEAST_SECONDS", 0.0)
    said: list[str] = []
    return outrider.load(bundle, cache_size=0.02, progress=said.append, **options), said


def test_acceptance_is_known_before_the_first_request_and_measured_once(
    tiny_pair: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The draft model equals the main model, so nearly all of its tokens are accepted. Requests find no such answer."""
    engine, said = load(tiny_pair, monkeypatch, answer_store=str(tmp_path / "answers.bin"))
    with engine:
        assert any("Short answers are drafted" in line for line in said)
        share = engine._registry._records_of("auto").found["Greedy"].models["draft"].share
        assert share.weight >= ENOUGH_TOKENS
        assert share.mean > 0.9
        assert not engine.cache["main"].num_published_tokens
        assert engine._registry._store is not None
        assert not engine._registry._store._answers
    engine, said = load(tiny_pair, monkeypatch)
    with engine:
        assert not any("Short answers are drafted" in line for line in said)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("options", [{"keep_records": False}, {"drafter": None}, {"drafter": "suffix"}])
def test_nothing_is_tried_where_nothing_would_be_kept(
    tiny_pair: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    engine, said = load(tiny_pair, monkeypatch, **options)
    engine.close()
    assert not any("Short answers are drafted" in line for line in said)


def test_a_machine_on_which_answers_would_take_long_decodes_none(
    tiny_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_answers, "_MOST_SECONDS", 0.0)
    engine, said = load(tiny_pair, monkeypatch)
    engine.close()
    assert not any("Short answers are drafted" in line for line in said)


def test_a_trial_that_fails_leaves_the_engine_as_it_was(
    tiny_pair: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise outrider.DeviceError("no")

    monkeypatch.setattr(trial_answers, "replay", fail)
    engine, _ = load(tiny_pair, monkeypatch)
    with engine:
        assert "could not be tried: DeviceError('no')" in caplog.text
        assert engine.generate("ab", max_new_tokens=4, ignore_eos=True).token_ids
