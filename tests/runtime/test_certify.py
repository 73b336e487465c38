"""The certificate passes for a correct runtime, and fails for an incorrect one."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import outrider
from outrider.bundle import read_bundle, write_manifest
from outrider.cli import run
from outrider.config import LOSSY
from outrider.testing import FakeBackend
from outrider.tokens.verifiers import Coupled, Greedy
from outrider.types import Outcome
from outrider_bench.prompts import BenchPrompt
from outrider_bench.verify import certify, fitting
from outrider_bench.verify.exact import chi_square_p_value, expected_total_variation, total_variation

pytestmark = pytest.mark.any_format

PROMPTS = [BenchPrompt("one", "toy", "hello"), BenchPrompt("two", "toy", "abc abc")]


def nothing() -> None:
    """Progress that is not counted."""


def test_verify_is_green_on_a_real_model(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two prompts, of which one is copied from. Sampling is checked on a toy: with few samples."""
    monkeypatch.setattr(certify, "check_our_sampling", partial(certify.check_our_sampling, num_samples=200))
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Name three colours."}, {"prompt": "Repeat this twice: apples, pears, plums, cherries."}]
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert run(["verify", str(smollm2), "--prompts", str(prompts), "--max-new-tokens", "12", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] is True
    names = [check["name"] for check in result["checks"]]
    assert names[:5] == [
        "batch invariance", "greedy identity", "coupled identity", "cancelled answers leave no trace",
        "coupled sampling, draft:3",
    ]  # fmt: skip
    for check in result["checks"]:
        is_lossy = check["name"].split()[0] in LOSSY
        assert check["passed"] is (None if is_lossy else True), check


@pytest.mark.parametrize(("arguments", "message"), [
    (["--modes", "genai-ngram:3"], "--modes takes Outrider's modes"),
    (["--checks", "batching", "--cache-size", "0.0005", "--context", "256"], "--context 256 needs room for three"),
    (["--modes", "drat:3"], "There is no mode 'drat:3'"),
])  # fmt: skip
def test_what_cannot_be_verified_is_said_at_once(
    tiny: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(tiny), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("length", "longest"), [(256, 201), (64, None)])
def test_short_contexts_get_prompts_that_fit(
    tiny: Path, tmp_path: Path, length: int, longest: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what has no room is named, or left out where nobody asked for it."""
    bundle = read_bundle(shutil.copytree(tiny, tmp_path / "short"))
    geometry = replace(bundle.manifest.main.geometry, context_length=length)
    (bundle.folder / "outrider.json").unlink()
    write_manifest(bundle.folder, replace(bundle.manifest, main=replace(bundle.manifest.main, geometry=geometry)))
    some = ["--modes", "ngram:3", "--per-category", "1", "--json"]
    assert run(["verify", str(bundle.folder), "--checks", "greedy", *some]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    with outrider.load(bundle.folder) as engine:
        prompts = [BenchPrompt("long", "toy", "word " * 300), BenchPrompt("short", "toy", "a")]
        fitted, num_cut = fitting.fit_prompts(engine, prompts, fitting.fit_answers(engine))
        assert (num_cut, fitted[1]) == (1, prompts[1])
        assert fitting.fit_context(engine, None) == longest
        fitted, _ = fitting.fit_prompts(engine, prompts, 8)  # they have no room for longer answers
        assert certify.check_cancelled(engine, fitted, 1, 8, nothing).passed
    assert run(["verify", str(bundle.folder), "--checks", "batching", "--json"]) == (0 if longest else 2)
    assert ("--checks batching cannot be made" in capsys.readouterr().err) is (longest is None)


@pytest.mark.fast_cases(1)
@pytest.mark.every_format
def test_identity_is_counted(toy_engine: outrider.Engine) -> None:
    advanced: list[int] = []
    subject = certify.our_subject(toy_engine)
    check = certify.check_greedy(subject, toy_engine, PROMPTS, 30, lambda: advanced.append(1))
    assert check.passed
    assert check.figures["num_runs"] == len(advanced) == 2 * (3 * len(certify.LENGTHS) + 3)
    assert certify.check_coupled(subject, toy_engine, PROMPTS, 30, nothing).passed


@pytest.mark.parametrize("verifier", [Greedy, Coupled])
def test_a_verifier_that_accepts_too_much_is_noticed(
    toy_engine: outrider.Engine, verifier: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Greedy.verify

    def lenient(self: Any, draft: Any, rows: Any, noise: Any, position: int) -> Outcome:
        outcome = own(self, draft, rows, noise, position)
        return Outcome.of_chain(min(len(draft.first_chain), outcome.num_accepted + 1), outcome.next_token_id)

    monkeypatch.setattr(verifier, "verify", lenient)
    check_identity = certify.check_coupled if verifier is Coupled else certify.check_greedy
    check = check_identity(certify.our_subject(toy_engine), toy_engine, PROMPTS, 30, nothing)
    assert not check.passed
    assert check.figures["differing"][0]["logit_gap"] > 0
    assert "first at token" in check.detail


def test_a_backend_that_depends_on_its_batch_is_noticed() -> None:
    class Fickle(FakeBackend):
        def submit(self, chunks: Any) -> Any:
            step = super().submit(chunks)
            if len(chunks[0].token_ids) == 2:
                for row in step.logits[chunks[0]][:1]:
                    row[0] += np.float32(0.5)
            return step

    assert certify.check_batching(FakeBackend(16), 70).passed
    check = certify.check_batching(Fickle(16), 70)
    assert not check.passed
    assert "differ by up to 0.5" in check.detail
    assert check.figures["largest_difference"]["pieces of 2"] == 0.5


def test_verify_exits_with_1_on_failure(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = certify.Check("batch invariance", False, "logits differ")
    monkeypatch.setattr(certify, "check_batching", lambda *_: failed)
    assert run(["verify", str(tiny), "--checks", "batching"]) == 1
    printed = capsys.readouterr()
    assert "FAILED" in printed.out
    assert printed.err.splitlines()[-1] == ("outrider: These checks failed on this machine: batch invariance.")


def test_total_variation_of_exact_samples() -> None:
    exact: dict[tuple[int, ...], float] = {(0,): 0.5, (1,): 0.5}
    assert total_variation({(0,): 50, (1,): 50}, exact) == 0
    assert total_variation({(0,): 100}, exact) == 0.5
    assert expected_total_variation(exact, 10_000) == pytest.approx(0.004, abs=0.002)
    assert chi_square_p_value({(2,): 1}, exact) == 0
