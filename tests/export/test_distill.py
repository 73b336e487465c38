"""`outrider distill`: what is refused before it begins, what is chosen, shown and written, on a tiny main model."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from filelock import FileLock

from exports import check_answers
from outrider.bundle import Bundle, read_bundle, write_manifest
from outrider.drafters.prediction import Costs, SpeedPrediction, needed, predict
from outrider.errors import ExportError, OptionError
from outrider.testing import save_toy_bundle
from outrider_distill import progress
from outrider_distill.answers import DataProgress
from outrider_distill.card import card, command
from outrider_distill.plan import Options, check_options, freeze, make_the_plan, parse_count
from outrider_distill.prediction import DistillTrial, choose, grown, shortfall
from outrider_distill.progress import Live, Stopping, signals_elsewhere
from outrider_distill.run import distill
from outrider_distill.train.fit import Stopped
from outrider_distill.train.status import Evaluation, TrainingStatus

OPTIONS = Options("main", Path("drafter"), kind="draft", source="small", num_layers=2, num_tokens=2000, hours=1.0)


@pytest.fixture
def options(tied: Path, tmp_path: Path) -> Options:
    """For a tiny checkpoint, with an output that is not there."""
    return replace(OPTIONS, main=str(tied), output=tmp_path / "drafter")


@pytest.mark.parametrize(("changes", "said"), [
    ({"kind": "eagle"}, "Did you mean 'eagle3'"),
    ({"num_tokens": 10}, "tokens=10 is too few"),
    ({"hours": 0.0}, "hours=0 is not above 0"),
    ({"source": None}, "of the same vocabulary with --from"),
    ({"kind": "eagle3"}, "--layers is for draft models, and kind='eagle3' is a head"),
    ({"kind": "auto", "num_layers": None}, "--from and --layers go together"),
    ({"num_layers": 0}, "layers=0 leaves no layer"),
])  # fmt: skip
def test_wrong_options_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        check_options(replace(OPTIONS, **changes))


def test_only_one_process_works_in_a_folder(options: Options) -> None:
    options.work.mkdir()
    with (
        FileLock(options.work / "lock"),
        pytest.raises(ExportError, match="Another outrider distill or improve is"),
    ):
        distill(options)


def test_a_name_that_is_taken_is_refused_at_once(tmp_path: Path, toy_bundle: Bundle) -> None:
    into = replace(OPTIONS, into=toy_bundle.folder)
    with pytest.raises(OptionError, match="has a drafter 'draft' already"):
        check_options(replace(into, output=tmp_path / "draft"))
    check_options(replace(into, output=tmp_path / "another"))
    with pytest.raises(ExportError, match="exists. Choose another name"):
        check_options(replace(OPTIONS, output=tmp_path))


def test_tokens_are_read_as_people_write_them() -> None:
    assert [parse_count(each) for each in ("2M", "500k", "1,000", "0.5m")] == [2_000_000, 500_000, 1000, 500_000]
    with pytest.raises(OptionError, match="'many' is not a number of tokens"):
        parse_count("many")


def test_a_plan_says_what_it_takes(options: Options) -> None:
    check_options(options)
    said = " ".join(make_the_plan(options).lines())
    assert re.search(r"kind draft .* 2,000 tokens .*Disk: .* GB.*Memory: .* GB.*Time: up to 1 hours", said)
    more = make_the_plan(replace(options, num_tokens=4000))
    assert more.bytes_of_data == 2 * make_the_plan(options).bytes_of_data


def test_where_the_disk_lacks_room_tokens_that_fit_are_said(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ExportError, match=r"has 0\.0 GB free. Use another disk"):
        make_the_plan(options)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2 * 10**9}))
    large = replace(options, num_tokens=50_000_000)
    with pytest.raises(ExportError) as refused:
        make_the_plan(large)
    (count,) = re.findall(r"--tokens (\d+k)", str(refused.value))
    make_the_plan(replace(large, num_tokens=parse_count(count)))


def test_too_few_layers_are_said_before_anything_is_written(options: Options) -> None:
    with pytest.raises(ExportError, match="The main model has 2 layers"):
        make_the_plan(replace(options, kind="eagle3", source=None, num_layers=None))


def test_a_frozen_plan_goes_on_with_the_same_options_only(options: Options, tmp_path: Path) -> None:
    path, prompts = options.work / "plan.json", tmp_path / "prompts.txt"
    prompts.write_text("Why is the sky blue?\n", encoding="utf-8")
    options = replace(options, prompts=prompts)
    first = freeze(make_the_plan(options), path)
    assert freeze(make_the_plan(options), path) == first
    with pytest.raises(OptionError, match=r"was begun with tokens=2000, and this is 3000"):
        freeze(make_the_plan(replace(options, num_tokens=3000)), path)
    with pytest.raises(OptionError, match=r"seed=0, and this is 1"):
        freeze(make_the_plan(replace(options, seed=1)), path)
    with pytest.raises(OptionError, match=r"was begun with main_sha256="):  # a bundle has other files now
        freeze(replace(first, main_sha256="abc"), path)
    prompts.write_text("Why is the grass green?\n", encoding="utf-8")
    with pytest.raises(OptionError, match="was begun with prompts="):
        freeze(make_the_plan(options), path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ExportError, match="Delete the work folder"):
        freeze(first, path)


def trial(kind: str, speed_up: float, acceptance: float = 0.7) -> DistillTrial:
    return DistillTrial(kind, [0.5] * 4, [acceptance] * 4, SpeedPrediction(2, 2.0, speed_up), 1.0)


def test_the_kind_that_is_to_gain_most_is_taken() -> None:
    trials = [trial("eagle3", 1.5), trial("draft", 1.2)]
    assert choose(trials).kind == "eagle3"
    assert "eagle3: accepted by position 50% 50% 50% 50%; after training 70% 70% 70% 70% are expected, 1.50×" in str(
        trials[0]
    )
    assert choose([replace(trial("draft-24", 1.7), replaced=1.7), trial("eagle3", 1.3)]).kind == "eagle3"
    # Where nothing gains, acceptance decides.
    assert choose([trial("eagle3", 1.0, 0.3), trial("draft", 1.0, 0.2)]).kind == "eagle3"


def test_acceptance_grows_with_the_logarithm_of_the_steps() -> None:
    def curve(*points: tuple[int, float]) -> list[dict[str, Any]]:
        return [{"step": step, "acceptance": [share, 0.4], "tokens_per_round": share} for step, share in points]

    assert grown(curve((0, 0.5), (12, 0.6), (24, 0.55)), 60) == [0.7, 0.4]  # log(1 + 60 / 4) is twice log(1 + 12 / 4)
    assert grown(curve((0, 0.5), (12, 0.7)), 10_000) == [0.85, 0.4]  # no more than half of the rest
    for known in (curve((0, 0.5)), curve((0, 0.5), (12, 0.4)), curve((0, 0.2), (70, 0.5))):
        assert grown(known, 60) == [0.5, 0.4]  # nothing is known of more steps, or so many were taken


def status(num_evaluations: int) -> TrainingStatus:
    evaluations = [
        Evaluation(10 * i, 1000 * i, 4.0 / i, [0.5, 0.1 * i], 1.5 + 0.1 * i) for i in range(1, num_evaluations + 1)
    ]
    return TrainingStatus("eagle3", 30, 60, 1, 3000, 1.25, 90.0, evaluations)


def test_lines_show_acceptance_time_left_and_what_to_expect() -> None:
    lines: list[str] = []
    live = Live(["A plan."], lines.append)
    live.costs = Costs(check=[10.0, 10.0, 10.0], draft=[1.0, 2.0])
    live.stage("Training eagle3")
    for count in (1, 2, 3):
        live.stepped(status(count))
        live.evaluated(status(count))
    assert lines[0] == "A plan."
    assert "Training eagle3" in lines
    for part in ("30 of 60", "0:01:30", "acceptance by position 50% 30%", "1.250", "1.38× with 2 draft tokens"):
        assert part in lines[-1]


def written(num_tokens: int, seconds: float, **changes: Any) -> DataProgress:
    return DataProgress(
        **{
            "num_tokens": num_tokens, "num_safe": 0, "num_wanted": 100, "num_expected": 400, "num_conversations": 3,
            "num_written": 900, "seconds": seconds, "seconds_left": 60.0, "is_asking": True, "batch_size": 16,
            "removed": {}, **changes,
        }
    )  # fmt: skip


def test_what_is_kept_of_the_data_is_said_with_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY", -1.0)
    lines: list[str] = []
    live = Live([], lines.append)
    live.wrote(written(0, 1.0, is_asking=False, num_expected=100, seconds_left=None))
    assert "now writing prompts" in lines[-1]
    assert "time left not known yet" in lines[-1]
    live.wrote(written(300, 90.0))
    for part in ("300 of about 400", "900, 10 per second", "left 0:01:00"):
        assert part in lines[-1]
    live.wrote(written(400, 120.0, num_safe=400))
    assert lines[-1] == "tokens kept 400, conversations 3"


def test_a_line_takes_the_place_of_the_one_before() -> None:
    lines: list[str] = []
    shown: list[str] = []
    live = Live([], lines.append, shown.append)
    live.stage("Writing data")
    live.wrote(written(300, 90.0))
    live.wrote(written(400, 120.0, num_safe=400))
    assert lines[-2:] == ["Writing data", "tokens kept 400, conversations 3"]
    assert [line.partition(",")[0] for line in shown] == ["", "time left 0:01:00"]


def test_a_drafter_that_does_not_pay_says_what_it_would_take() -> None:
    costs = Costs(check=[10.0] + [11.0] * 8, draft=[1.0 + i for i in range(8)])
    training = {"held_out_acceptance_by_place": [0.05, 0.04], "data_answer_tokens": 5000}
    said = shortfall(predict([0.05, 0.04], costs), costs, training)
    share = needed(1.2, costs)
    assert share
    assert predict([share] * 8, costs).speed_up >= 1.2 > predict([share - 0.01] * 8, costs).speed_up
    for part in ("1.00 × plain decoding", "5% of first draft tokens", f"1.2 × needs {share:.0%}", "5,000", "--hours"):
        assert part in said
    assert not shortfall(predict([0.6, 0.5], costs), costs, training)
    dear = Costs(check=[10.0, 30.0], draft=[10.0])
    assert "No acceptance rate would give" in shortfall(predict([0.5], dear), dear, training)


def test_ctrl_c_waits_for_the_step_and_a_second_one_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with signals_elsewhere(), Stopping() as stopped:
        assert not stopped()
        press_ctrl_c()
        while not stopped():
            time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.needs("POSIX")
def test_signals_do_not_go_to_the_thread_that_has_models() -> None:
    with signals_elsewhere():
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def press_ctrl_c() -> None:
    """To the process, as a terminal does: another thread than this one receives it."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)


TRAINING: dict[str, Any] = {
    "recipe": "outrider distill main -o drafter", "kind": "eagle3", "steps": 100, "hours": 0.5,
    "main_model": {"id": "org/main", "revision": "abc", "weights": "int8"},
    "prompts": {"file": "mine.txt", "conversations": {"model": 30, "user": 10}},
    "hours_by_stage": {"data": 1.5, "training": 0.5}, "data_answer_tokens": 12_345, "trained_answer_tokens": 40_000,
    "held_out_acceptance_by_place": [0.61, 0.42], "held_out_tokens_per_round": 1.87,
    "prediction": {"num_draft_tokens": 2, "tokens_per_round": 1.87, "speed_up": 1.34},
}  # fmt: skip


def test_the_card_is_complete() -> None:
    text = card(TRAINING)
    front = text.split("---")[1]
    assert 'base_model: "org/main"' in front
    for part in (
        "kind eagle3 for org/main", "revision abc", "12,345 tokens", "30 from the model",
        "10 from the user", "mine.txt.", "100 steps", "0.50 hours", "data 1.50 h", "1.34 × plain decoding",
        "| 61% | 42% |", "1.87", "outrider distill main -o drafter",
    ):  # fmt: skip
        assert part in text, part


def test_the_recipe_has_names_and_no_paths(tied: Path, tmp_path: Path) -> None:
    asked = replace(OPTIONS, main=str(tied), output=tmp_path / "my drafter", prompts=tmp_path / "p.txt")
    found = command(asked)
    assert str(tmp_path) not in found
    assert found.startswith("outrider distill tied -o 'my drafter' --kind draft --tokens 2000 --hours 1 --seed 0")
    assert found.endswith("--prompts p.txt")


@pytest.fixture
def main_model(convert: Any, make_checkpoint: Any, tmp_path: Path) -> Path:
    """A bundle of a tiny main model with six layers, in a folder of its own."""
    bundle, _ = convert(make_checkpoint("six", num_hidden_layers=6, seed=3), weights="fp32")
    folder: Path = shutil.copytree(bundle.folder, tmp_path / "main")
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"Count from {i} to {i + 9}, please.\n" for i in range(400)), encoding="utf-8")
    return path


class StopAt:
    """Raises the signal of Ctrl-C once, when a line of these words is told."""

    def __init__(self, *words: str) -> None:
        self._words, self.lines = list(words), list[str]()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if self._words and self._words[0] in line:
            self._words.pop(0)
            press_ctrl_c()


@pytest.mark.slow
def test_a_draft_model_is_cut_healed_and_added(
    main_model: Path, make_checkpoint: Any, prompts: Path, tmp_path: Path
) -> None:
    source = make_checkpoint("six", num_hidden_layers=6, seed=3)
    asked = Options(
        str(main_model), tmp_path / "cut", kind="draft", source=str(source), num_layers=2, num_tokens=2000, hours=0.1,
        prompts=prompts, into=main_model,
    )  # fmt: skip
    found = distill(asked)
    assert found.kind == "draft"
    assert not asked.work.exists()
    assert len(found.report["costs"]["draft"]) >= 4
    assert found.report["trained_answer_tokens"] > 0
    (drafter,) = read_bundle(main_model).manifest.drafters
    assert (drafter.name, drafter.kind, drafter.model.geometry.num_layers) == ("cut", "draft_model", 2)
    check_answers(main_model, "Count from 3 to 12, please.", "cut")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_drafter_is_made_stopped_and_gone_on_with_and_drafts_losslessly(
    main_model: Path, make_checkpoint: Any, prompts: Path, tmp_path: Path
) -> None:
    asked = Options(
        str(main_model), tmp_path / "drafter", source=str(make_checkpoint("six", num_hidden_layers=6, seed=3)),
        num_layers=2, num_tokens=1500, hours=0.2, prompts=prompts, into=main_model, keep_work=True,
    )  # fmt: skip
    # Lines of evaluations come between Ctrl-C's handlers of two stages.
    tell = StopAt("acceptance by position", "acceptance by position")
    for _ in range(2):
        with pytest.raises(Stopped):
            distill(asked, tell=tell)
        assert not asked.output.exists()
    found = distill(asked, tell=tell)
    assert found.kind in ("eagle3", "draft")
    training = json.loads((asked.output / "training.json").read_text(encoding="utf-8"))
    assert [each["kind"] for each in training["trials"]] == ["eagle3", "draft"]
    assert training["held_out_acceptance_by_place"]
    assert (tmp_path / "drafter.work").is_dir()
    check_answers(main_model, "Count from 3 to 12, please.", read_bundle(main_model).manifest.drafters[0].name)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_head_is_trained_further(main_model: Path, prompts: Path, tmp_path: Path) -> None:
    asked = Options(str(main_model), tmp_path / "first", kind="eagle3", num_tokens=1500, hours=0.2, prompts=prompts)
    distill(asked)
    assert {path.name for path in asked.output.iterdir()} == {
        "README.md", "config.json", "model.safetensors", "training.json"
    }  # fmt: skip
    further = distill(replace(asked, output=tmp_path / "further", source=str(asked.output))).report
    assert further["started_from"] == "first"
    assert further["curve"][0]["step"] == 0  # what it begins with is evaluated, and kept if nothing is better
    assert further["held_out_tokens_per_round"] >= further["curve"][0]["tokens_per_round"]


@pytest.mark.slow
@pytest.mark.needs("POSIX")
def test_what_is_killed_at_a_random_moment_ends_in_the_same_weights(
    main_model: Path, prompts: Path, tmp_path: Path
) -> None:
    """OUTRIDER_KILLS: how often, by default once. Each stage is stopped in the process in tests of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # PyTorch's sums depend on the number of threads

    def start(name: str) -> subprocess.Popen[str]:
        asked = ["--kind", "eagle3", "--tokens", "1500", "--hours", "2", "--prompts", str(prompts), "--keep-work"]
        command = [sys.executable, "-m", "outrider", "distill", str(main_model), "-o", str(tmp_path / name), *asked]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    began = time.monotonic()
    whole = start("whole")
    said, _ = whole.communicate(timeout=600)
    assert whole.returncode == 0, said
    seconds = time.monotonic() - began
    for moment in np.random.default_rng(int(began)).uniform(0, seconds, int(os.environ.get("OUTRIDER_KILLS", "1"))):
        running = start("killed")
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.communicate(timeout=moment)
        running.kill()
        running.communicate()
        if (tmp_path / "killed").exists():  # it was faster than that
            shutil.rmtree(tmp_path / "killed")
            shutil.rmtree(tmp_path / "killed.work")
    last = start("killed")
    said, _ = last.communicate(timeout=600)
    assert last.returncode == 0, said
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.needs("POSIX")
@pytest.mark.parametrize(("number", "delay"), [(signal.SIGTERM, 1.5), (signal.SIGINT, 0.0)])
def test_a_signal_before_the_first_step_ends_it_in_words(
    main_model: Path, prompts: Path, tmp_path: Path, number: int, delay: float
) -> None:
    """While the drafter's costs are measured, in the process that has made several models."""
    asked = ["--kind", "eagle3", "--tokens", "1500", "--hours", "2", "--prompts", str(prompts)]
    command = [sys.executable, "-u", "-m", "outrider", "distill", str(main_model), "-o", str(tmp_path / "made"), *asked]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout
    said = list(itertools.takewhile(lambda line: "Training eagle3" not in line, running.stdout))
    time.sleep(delay)
    running.send_signal(number)
    rest, _ = running.communicate(timeout=300)
    assert running.returncode == 130, (running.returncode, said, rest)
    assert "Traceback" not in rest


@pytest.mark.slow
def test_the_main_model_is_read_from_its_graph_as_it_is_in_the_checkpoint(
    main_model: Path, make_checkpoint: Any
) -> None:
    from transformers import AutoModelForCausalLM

    from outrider_distill.main_model import read_teacher
    from outrider_distill.train.layers import Teacher

    expected = Teacher.of(AutoModelForCausalLM.from_pretrained(make_checkpoint("six", num_hidden_layers=6, seed=3)))
    found = read_teacher(read_bundle(main_model))
    assert found.shape._replace(context_length=0) == expected.shape._replace(context_length=0)
    for name in ("embedding", "lm_head", "norm"):
        assert np.allclose(getattr(found, name), getattr(expected, name).detach(), atol=1e-3), name
    for own, other in zip(found.layers, expected.layers, strict=True):
        assert {*own} == {*other}
        assert all(np.allclose(each, other[name].detach(), atol=1e-3) for name, each in own.items())


@pytest.mark.parametrize("kind", ["eagle3", "auto"])
def test_only_main_models_without_hidden_states_are_refused_heads(kind: str, tmp_path: Path) -> None:
    main = save_toy_bundle(tmp_path / "toy", states=True, padded=False)
    asked = Options(str(main.folder), tmp_path / "out", kind="draft", source="small", num_layers=2)
    assert make_the_plan(asked).kind == "draft"
    geometry = msgspec.structs.replace(main.manifest.main.geometry, architecture="gpt2", num_layers=12, layer_states=())
    entry = msgspec.structs.replace(main.manifest.main, geometry=geometry)
    (main.folder / "outrider.json").unlink()
    write_manifest(main.folder, msgspec.structs.replace(main.manifest, main=entry, drafters=()))
    with pytest.raises(ExportError, match="architecture 'gpt2', whose hidden states are not found"):
        make_the_plan(replace(asked, kind=kind, source=None, num_layers=None))
