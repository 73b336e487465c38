"""The certificate passes where it should, and notices what it is there to notice."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import outrider
from outrider.bench import certify
from outrider.bench.prompts import Prompt
from outrider.cli import run
from outrider.testing import FakeBackend
from outrider.types import Outcome
from outrider.verifiers import Coupled, Greedy, Rejection

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [Prompt("one", "toy", "hello"), Prompt("two", "toy", "abc abc")]


def test_verify_is_green_on_a_real_model(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(smollm2), "--per-category", "1", "--max-new-tokens", "12", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] is True
    assert [check["name"] for check in result["checks"]] == [
        "batch invariance", "greedy identity", "coupled identity", "rejection sampling",
    ]  # fmt: skip


def test_identity_is_counted(toy_engine: outrider.Engine) -> None:
    advanced: list[int] = []
    check = certify.check_greedy(toy_engine, PROMPTS, 30, lambda: advanced.append(1))
    assert check.passed
    assert check.figures["num_runs"] == len(advanced) == 2 * 2 * len(certify.LENGTHS)
    assert certify.check_coupled(toy_engine, PROMPTS, 30).passed


@pytest.mark.parametrize("verifier", [Greedy, Coupled])
def test_a_verifier_that_accepts_too_much_is_noticed(
    toy_engine: outrider.Engine, verifier: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Greedy.verify

    def lenient(self: Any, draft: Any, rows: Any, noise: Any, position: int) -> Outcome:
        outcome = own(self, draft, rows, noise, position)
        return Outcome(min(len(draft), outcome.num_accepted + 1), outcome.next_token_id)

    monkeypatch.setattr(verifier, "verify", lenient)
    check = certify.check_greedy(toy_engine, PROMPTS, 30)
    if verifier is Coupled:
        check = certify.check_coupled(toy_engine, PROMPTS, 30)
    assert not check.passed
    assert check.figures["differing"][0]["logit_gap"] > 0
    assert "first at token" in check.detail


def test_rejection_that_keeps_everything_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(self: Any, draft: Any, rows: Any, noise: Any, position: int) -> Outcome:
        return Outcome(len(draft), rows.distribution(len(draft)).draw(noise.uniforms(position, "bonus", 1)[0]))

    config = outrider.Config().replace(stop_token_ids=[50256], min_new_tokens=20)  # of the bundle, not of the toy
    assert certify.check_rejection(config, num_samples=1000).passed
    monkeypatch.setattr(Rejection, "verify", lenient)
    assert not certify.check_rejection(config, num_samples=1000).passed


def test_a_backend_that_depends_on_its_batch_is_noticed() -> None:
    class Fickle(FakeBackend):
        def submit(self, chunks: Any) -> Any:
            step = super().submit(chunks)
            if len(chunks[0].token_ids) == 1:
                step.rows[0][0] += np.float32(0.5)
            return step

    assert certify.check_batching(FakeBackend(16), 16).passed
    check = certify.check_batching(Fickle(16), 16)
    assert not check.passed
    assert "0.5: pieces of 1" in check.detail


def test_verify_exits_with_1_on_failure(
    smollm2: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = certify.Check("batch invariance", False, "logits differ")
    monkeypatch.setattr(certify, "check_batching", lambda *_: failed)
    monkeypatch.setattr(certify, "check_rejection", lambda *_: certify.Check("rejection sampling", True, "fine"))
    assert run(["verify", str(smollm2), "--per-category", "1", "--max-new-tokens", "2"]) == 1
    printed = capsys.readouterr()
    assert "FAILED" in printed.out
    assert printed.err.splitlines()[-1] == "outrider: Not certified on this device: batch invariance."


def test_total_variation_of_exact_samples() -> None:
    exact: dict[tuple[int, ...], float] = {(0,): 0.5, (1,): 0.5}
    assert certify.total_variation({(0,): 50, (1,): 50}, exact) == 0
    assert certify.total_variation({(0,): 100}, exact) == 0.5
    assert certify.expected_total_variation(exact, 10_000) == pytest.approx(0.004, abs=0.002)
    assert certify.chi_square_p_value({(2,): 1}, exact) == 0
