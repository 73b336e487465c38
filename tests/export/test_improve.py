"""`outrider improve`: what is kept, what is restored, what goes on after a stop, and what it reads of a bundle."""

import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exports import check_answers
from outrider.bundle import Bundle, read_bundle
from outrider.cli import run
from outrider.errors import ExportError
from outrider.testing import save_toy_bundle
from outrider_distill import improve as module
from outrider_distill import improve_work, machine
from outrider_distill.draft.from_bundle import write_checkpoint
from outrider_distill.improve import NAME, improve, judge
from outrider_distill.improve_work import ImproveRound, ImproveWork
from outrider_distill.machine import Others
from outrider_distill.progress import Stopping
from outrider_distill.train.fit import Stopped


def measured(
    identical: int = 6, failures: Any = (), least: float = 1.1, most: float = 1.3, **ratios: float
) -> dict[str, Any]:
    """What the benchmark says of two categories; all: of both. most: the largest ratio of a category."""
    names = {"code": 1.2, "math": 1.1, "all": 1.15} | ratios
    rows = [
        {
            "mode": mode, "category": name, "tokens_per_second": 10.0 * (ratio if mode == "auto@new" else 1),
            "end_to_end": ratio if mode == "auto@new" else 1.0, "identical": identical, "num_prompts": 6,
            "end_to_end_interval": (least, 1.3 if name == "all" else most),
        }
        for mode in ("auto", "auto@new") for name, ratio in names.items()
    ]  # fmt: skip
    return {"summary": rows, "failures": [*failures]}


@pytest.mark.parametrize(("results", "kept", "why"), [
    (measured(), True, "answers take 0.87 of the time"),
    (measured(all=1.02), False, "0.97 at most, beyond chance, is asked for"),
    (measured(least=0.9), False, "0.87 of the time, and 0.97 at most, beyond chance"),
    (measured(math=0.96, most=0.99), False, r"slower: math \(0.96\)"),
    (measured(math=0.9, most=1.01), True, "answers take 0.87 of the time"),
    (measured(identical=5), False, "1 texts differ"),
])  # fmt: skip
def test_what_is_faster_in_all_and_slower_in_nothing_is_kept(results: dict[str, Any], kept: bool, why: str) -> None:
    found = judge(results)
    assert found[0] is kept
    assert re.search(why, found[1])
    assert found[2][0][:3] == ("code", 10.0, 12.0)


def test_a_failed_measurement_is_said() -> None:
    with pytest.raises(ExportError, match="cannot be measured: auto@new: it died. Run it again"):
        judge(measured(failures=[{"mode": "auto@new", "error": "it died"}]))


@pytest.fixture
def work(toy_bundle: Bundle, tmp_path: Path) -> ImproveWork:
    """Of a bundle whose round 1 has made a new one."""
    shutil.copytree(toy_bundle.folder, tmp_path / "bundle")
    found = ImproveWork(tmp_path / "bundle")
    save_toy_bundle(found.new, seed=7)
    found.drafter(1).mkdir()
    return found


KEPT = ImproveRound(1, "draft", True, "answers take 0.87 of the time", [], "")


def names_in(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*")}


def test_what_is_kept_is_undone(work: ImproveWork) -> None:
    before, after = (read_bundle(each).manifest for each in (work.path, work.new))
    work.end(KEPT)
    assert read_bundle(work.path).manifest == after
    assert work.in_place == work.rounds[1]
    assert work.drafter(1).exists()  # the next round goes on from it
    assert work.status()[0].startswith("Round 1, draft: kept; answers take 0.87")
    work.undo()
    assert read_bundle(work.path).manifest == before
    assert work.status() == ["Round 1, draft: undone; answers take 0.87 of the time.", "No round is under way."]
    assert names_in(work.folder) <= {"rounds.json", "lock"}
    with pytest.raises(ExportError, match="no improvement to undo"):
        work.undo()


def test_of_what_is_not_kept_the_last_head_stays(work: ImproveWork) -> None:
    before = read_bundle(work.path).manifest
    work.end(replace(KEPT, kept=False))
    assert read_bundle(work.path).manifest == before
    assert names_in(work.folder) <= {"rounds.json", "lock"}
    for number in (2, 3):
        work.drafter(number).mkdir()
        work.end(replace(KEPT, number=number, kind="eagle3", kept=False))
    assert names_in(work.folder) - {"lock"} == {"rounds.json", "drafter-3"}


def test_a_kill_between_two_renames_is_mended(work: ImproveWork, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an error, or Ctrl-C, restores the bundle at once."""
    before = read_bundle(work.path).manifest
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path == work.new:
            raise OSError(13, "it is open")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ExportError, match="cannot be replaced: it is open"):
        work.end(KEPT)
    assert read_bundle(work.path).manifest == before
    work.path.rename(work.folder / "before-1")
    with work.opened() as found:
        assert found.manifest == before


def test_a_bundle_that_was_changed_is_not_undone(work: ImproveWork) -> None:
    work.end(KEPT)
    manifest = work.path / "outrider.json"
    content = manifest.read_bytes()
    manifest.unlink()
    manifest.write_bytes(content + b"\n")
    with pytest.raises(ExportError, match="has changed since it was improved"):
        work.undo()


@pytest.mark.parametrize(("user", "battery", "told"), [
    (90, False, "Waiting, as other programs use 90% of the processor."),
    (10, True, "Waiting, as the machine runs on its battery."),
    (10, False, None),
])  # fmt: skip
def test_it_waits_while_others_need_the_machine(
    user: int, battery: bool, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, ticks, supply = [0.0], [0, 0], tmp_path / "supplies" / "BAT0"
    supply.mkdir(parents=True)
    (supply / "type").write_text("Battery\n")
    monkeypatch.setattr(machine, "_SUPPLIES", tmp_path / "supplies")
    monkeypatch.setattr(machine, "_STAT", tmp_path / "stat")

    def write(share: int, discharging: bool) -> None:
        ticks[:] = ticks[0] + share, ticks[1] + 100 - share
        (tmp_path / "stat").write_text(f"cpu {ticks[0]} {ticks[1]} 0 0\ncpu0 1 1 1 1\n")
        (supply / "status").write_text("Discharging\n" if discharging else "Full\n")

    def sleep(seconds: float) -> None:
        now[0] += seconds
        write(10, False)  # they have ended

    write(0, False)
    lines: list[str] = []
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    others = Others(lines.append, 1.0)
    now[0] = 6.0
    write(user, battery)
    stopped = Stopping()
    assert others.wait(stopped) == (5.0 if told else 0.0)
    assert lines == ([told] if told else [])
    now[0] += 3600
    others.wait(stopped)
    assert others.is_over
    assert stopped()


@pytest.fixture(scope="module")
def pair(convert: Any, make_checkpoint: Any) -> Any:
    """`pair("onnx", "int8")`: a bundle of two models of six layers, and the draft model's checkpoint."""

    def make(form: str, weights: str) -> tuple[Bundle, Path]:
        main, draft = (make_checkpoint(f"six-{seed}", num_hidden_layers=6, seed=seed) for seed in (3, 4))
        return convert(main, draft, format=form, weights=weights, draft_weights=weights)[0], draft

    return make


@pytest.mark.parametrize(
    ("form", "weights", "most"), [("onnx", "int8", 0.01), ("openvino", "int8", 0.01), ("onnx", "int4", 0.1)]
)
def test_a_draft_model_is_read_back(pair: Any, form: str, weights: str, most: float, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    bundle, checkpoint = pair(form, weights)
    write_checkpoint(bundle, bundle.manifest.drafters[0], tmp_path / "draft")
    found, right = (AutoModelForCausalLM.from_pretrained(each) for each in (tmp_path / "draft", checkpoint))
    tensors = found.state_dict()
    assert tensors.keys() == right.state_dict().keys()
    for name, wanted in right.state_dict().items():
        assert (tensors[name].float() - wanted).norm() <= most * wanted.norm(), name
    assert found.config.tie_word_embeddings
    assert found.config.rope_parameters["rope_theta"] == pytest.approx(10_000, rel=1e-3)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"Count from {i} to {i + 9}, please.\n" for i in range(400)), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("form", ["openvino", "onnx"])
def test_a_bundle_is_improved_and_undone(
    pair: Any,
    form: str,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made, _ = pair(form, "int8")
    path = tmp_path / "bundle"
    shutil.copytree(made.folder, path)
    before = read_bundle(path).manifest
    monkeypatch.setattr(improve_work, "_MOST_TOKENS", 1500)
    monkeypatch.setattr(module, "measure", lambda *_: measured())

    lines: list[str] = []

    def stop(line: str) -> None:
        if "acceptance by position" in line and not any("acceptance by position" in each for each in lines):
            os.kill(os.getpid(), signal.SIGINT)  # as a terminal does: another thread receives it
            time.sleep(0.2)
        lines.append(line)

    with pytest.raises(Stopped):
        improve(path, prompts=prompts, hours=0.2, tell=stop)
    assert read_bundle(path).manifest == before
    assert run(["improve", str(path), "--status"]) == 0
    said = capsys.readouterr().out
    assert "Round 1 is under way: 0.0" in said
    assert "Trials: 0 of 5 (eagle3, draft-6, draft-4, draft-3, draft-2)" in said
    assert improve(path).kept
    (name,) = [each.name for each in read_bundle(path).manifest.drafters if each.name.startswith(NAME)]
    check_answers(path, "Count from 3 to 12, please.", name)
    monkeypatch.setattr(module, "measure", lambda *_: measured(all=1.0))
    after = read_bundle(path).manifest
    lines.clear()
    assert not improve(path, prompts=prompts, hours=0.2, tell=lines.append).kept  # goes on from what is there
    assert [line for line in lines if re.search(r"; [\d,]{3,} tokens are there", line)]
    assert read_bundle(path).manifest == after
    assert run(["improve", str(path), "--undo"]) == 0
    assert read_bundle(path).manifest == before
