"""The simulator: its clock, compared with manual calculations, and its tokens, compared with real ones."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, call

import pytest

import outrider
from outrider.cli import run
from outrider.drafters import Suffix
from outrider.engine.engine import Engine
from outrider.errors import DeviceError, OptionError
from outrider.models.measure import LONGEST, Contention, PassCost, measure_contention
from outrider.testing import FakeBackend, ToyTokenizer, save_toy_bundle
from outrider.types import NO_DRAFT, Backend, CompiledModel
from outrider_bench.modes.mode import Run
from outrider_bench.prompts import Prompt, Task
from outrider_bench.simulation.profiles import Profile, read_profile
from outrider_bench.simulation.simulate import _Clock, _Simulated, compare, simulate
from toys import load_toy

PROMPT = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A pair whose draft model is always right."""
    bundle = save_toy_bundle(tmp_path_factory.mktemp("right"), draft_noise=0.0)
    return load_toy(bundle, max_new_tokens=33, ignore_eos=True, overlap=False)


@pytest.fixture(autouse=True)
def sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its confidences are 1, so no recovered token is guessed."""
    monkeypatch.setattr("outrider.drafters.choices.Choices._confidence", lambda *_: 1.0)


def flat(seconds: float) -> PassCost:
    return PassCost((1, 16), (seconds, seconds), (seconds, seconds))


def profile(*, draft: float = 0.1, host: float = 0.0, contention: Contention | None = None) -> Profile:
    return Profile("by hand", flat(1.0), flat(draft), contention or Contention(1.0, 1.0), host)


def decode(engine: Engine, mode: str, given: Profile, *, overlap: bool = False) -> Run:
    ran = simulate(engine, given, PROMPT, engine.config.generation, mode, overlap=overlap)
    assert ran.token_ids == engine.generate(PROMPT, drafter=None).token_ids
    return ran


def test_plain_decoding_takes_a_check_and_the_host_for_every_token(right: Engine) -> None:
    assert decode(right, "plain", profile(host=0.25)).tokens_per_second == pytest.approx(1 / 1.25)


def test_a_draft_that_is_always_right_costs_its_steps_and_overlapped_nothing(right: Engine) -> None:
    # 32 tokens behind the first: eight rounds of three draft tokens and a bonus.
    apart = decode(right, "draft:3", profile())
    # The first draft also reads the prompt: four tokens in a call, at the same price.
    assert apart.tokens_per_second == pytest.approx(32 / (8 * 1.3))
    overlapped = decode(right, "draft:3", profile(), overlap=True)
    assert overlapped.tokens_per_second == pytest.approx(32 / (8 * 1.0 + 0.3))  # the first draft is not ahead
    expected = {"decode_seconds": 8.3, "check_seconds": 8, "draft_seconds": 0.3, "ahead_seconds": 7 * 0.4}
    assert {key: overlapped.stats[key] for key in expected} == pytest.approx(expected)  # times of the profile
    assert overlapped.stats["host_seconds"] == pytest.approx(0)


def test_calls_at_the_same_time_hold_each_other_up(right: Engine) -> None:
    slow = profile(contention=Contention(check=1.5, draft=2.0))
    # Four calls ahead take 4 · 0.2 s. Meanwhile 0.8 / 1.5 s of the target pass are done.
    overlapped = decode(right, "draft:3", slow, overlap=True)
    rounds = [0.8 + 1 - 0.8 / 1.5] * 7 + [1.0]  # nothing is drafted after the last round
    assert overlapped.tokens_per_second == pytest.approx(32 / (sum(rounds) + 0.3), rel=0.02)


def test_a_check_that_ends_first_waits_for_the_draft_call_under_way(right: Engine) -> None:
    overlapped = decode(right, "draft:3", profile(draft=0.7), overlap=True)
    # Two calls ahead fit: the expected token and one more, at 1.4 s; two are left to draft.
    assert overlapped.tokens_per_second == pytest.approx(32 / (8 * (1.4 + 2 * 0.7)), rel=0.1)
    assert overlapped.stats["check_seconds"] == pytest.approx(8)  # the device's own time, as devices say it
    in_time = decode(
        right, "draft:15", profile(), overlap=True
    )  # ten calls of 0.1 s take as long as a target pass, despite rounding
    assert in_time.stats["ahead_seconds"] == pytest.approx(1.0)


def test_the_controller_expects_a_check_to_be_held_up(right: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[tuple[float, float]] = []
    monkeypatch.setattr(PassCost, "follow", lambda _, expected, seconds: followed.append((seconds, expected)))
    given = profile(contention=Contention(check=2.5, draft=1.0))
    ran = simulate(right, given, PROMPT, right.config.generation.replace(max_new_tokens=200), "auto", overlap=True)
    assert ran.stats["ahead_seconds"] > 1
    held_up = ran.stats["ahead_seconds"] * (1 - 1 / 2.5)
    assert ran.stats["check_seconds"] == pytest.approx(ran.stats["num_rounds"] * 1.0 + held_up)
    for seconds, expected in followed:
        assert seconds == pytest.approx(expected)
    monkeypatch.undo()
    ran = simulate(right, given, PROMPT, right.config.generation, "auto", overlap=True)
    assert given.main.scale == given.draft.scale == 1  # the controller adapts copies of these


@pytest.mark.parametrize(("check", "draft"), [(1.0, 1.0), (1.5, 1.0), (1.0, 2.0), (1.5, 2.5)])
def test_what_is_measured_of_simulated_devices_is_their_contention(
    check: float, draft: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock(Contention(check, draft))
    main = _Simulated(FakeBackend(9), flat(1.0), clock, is_main=True)
    background = Mock()
    monkeypatch.setattr(main, "run_in_background", background, raising=False)
    monkeypatch.setattr("outrider.models.measure.overlap.time", SimpleNamespace(perf_counter=lambda: clock.now))
    other = _Simulated(FakeBackend(9), flat(0.031), clock, is_main=False)
    found = measure_contention(cast("CompiledModel", main), cast("Backend", other))
    assert (found.check, found.draft) == pytest.approx((check, draft))
    assert background.mock_calls == [call(True), call(False)]


def test_modes_are_what_they_are_elsewhere(right: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`draft` is the controller with the draft model only; with a number of tokens, there is no controller."""
    config = right.config.generation
    copies_nothing = Mock(side_effect=lambda requests: [NO_DRAFT] * len(requests))
    monkeypatch.setattr(Suffix, "propose", copies_nothing)
    cases: tuple[tuple[str, dict[str, Any], int, bool], ...] = (
        ("draft", {}, LONGEST, False),
        ("auto", {}, LONGEST, True),
        ("draft:2", {}, 2, False),
        ("auto", {"num_assistant_tokens": 2}, 2, False),
        ("plain", {}, 0, False),
    )
    for mode, options, longest, copies in cases:
        copies_nothing.reset_mock()
        asked = config.replace(**options, max_new_tokens=80)
        stats = simulate(right, profile(draft=0.01), PROMPT, asked, mode, overlap=False).stats
        assert max(stats["num_draft_tokens_per_round"]) == longest
        assert copies_nothing.called == copies


def test_a_machine_that_measures_itself_compares(right: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [Task(Prompt("a", "letters", "abc"), PROMPT)]
    found, rows = compare(right, tasks, ["plain", "draft:2", "auto"])
    assert found.host > 0
    assert [row["mode"] for row in rows] == ["plain", "draft:2", "draft:2, overlapped", "auto", "auto, overlapped"]
    assert all(row["measured"] > 0 and row["predicted"] > 0 for row in rows)
    assert not right.overlaps
    monkeypatch.setattr(right, "generate", Mock(side_effect=[right.generate(PROMPT), DeviceError("gone")]))
    with pytest.raises(DeviceError):
        compare(right, tasks, ["draft:2"])
    monkeypatch.undo()
    assert not right.overlaps
    _, predicted = compare(right, tasks, ["plain", "draft:2"], profile())
    assert [row["measured"] for row in predicted] == [0, 0, 0]
    assert predicted[0]["speed_up"] == 1


def test_profiles_are_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "npu.toml"
    calls = "rows = [1, 8]\nnear = [10, 12]\n"
    file.write_text(f"[main]\n{calls}[draft]\n{calls}far = [20, 24]\n[contention]\ncheck = 1.5\n")
    read = read_profile(file)
    assert read.name == "npu"
    assert read.main(1) == pytest.approx(0.01)
    assert read.draft(1, context=2048) == pytest.approx(0.02)
    assert read.contention == Contention(1.5, 1.0)
    with pytest.raises(OptionError, match="There is no profile"):
        read_profile(tmp_path / "none.toml")
    for wrong in ("[main]\n", f"[main]\n{calls}[draft]\n{calls}[other]\n"):
        file.write_text(wrong)
        with pytest.raises(OptionError, match=r"Profile .*npu\.toml cannot be read"):
            read_profile(file)


@pytest.mark.parametrize(
    ("table", "values", "message"),
    [
        ("draft", "rows = [8, 1]\nnear = [1, 2]", "rows = [8, 1]: numbers of rows ascend, from 1 or more"),
        ("main", "rows = [0, 1]\nnear = [1, 2]", "rows = [0, 1]: numbers of rows ascend"),
        ("main", "rows = []\nnear = []", "rows = []: numbers of rows ascend"),
        ("main", "rows = [1, 8]\nnear = [1]", "near = [1.0]: 2 numbers of rows have as many times"),
        ("main", "rows = [1]\nnear = [0]", "near = [0.0]: 0 milliseconds is no time of a call, which is above 0"),
        ("draft", "rows = [1]\nnear = [1]\nfar = [nan]", "far = [nan]: nan milliseconds is no time"),
        ("draft", "rows = [1]\nnear = [inf]", "near = [inf]: inf milliseconds is no time"),
        ("main", "rows = [1, 8]\nnear = [2, 3]\nfar = [2, 2.5]", "far = 2.5 where near = 3, for 8 rows: with more"),
        ("main", "rows = [1]\nnear = [1]\nfar = [8]", "far = 8 where near = 1, for 1 rows: with more context"),
        ("contention", "check = 0.9", "check = 0.9: next to another, a call takes 1 time as long or more"),
        ("contention", "draft = nan", "draft = nan: next to another"),
        ("host", "round = -1", "round = -1: milliseconds are 0 or more"),
    ],
)
def test_a_profile_that_cannot_be_meant_is_refused(tmp_path: Path, table: str, values: str, message: str) -> None:
    file = tmp_path / "npu.toml"
    calls = "rows = [1, 8]\nnear = [10, 12]"
    tables = {"main": calls, "draft": calls, table: values}
    file.write_text("\n".join(f"[{name}]\n{text}" for name, text in tables.items()))
    with pytest.raises(OptionError) as error:
        read_profile(file)
    assert f"Profile {file} has [{table}] {message}" in str(error.value)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("ngram", "'ngram' cannot be simulated: choose from plain, auto, draft and draft:N"),
        ("auto:3", "'auto:3' cannot be simulated"),
        ("draft@other", "'draft@other' cannot be simulated"),
        ("draft:0", "'draft:0' drafts nothing: give 1 token or more"),
    ],
)
def test_other_modes_are_refused_before_anything_is_loaded(
    right: Engine, mode: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OptionError, match=message):
        simulate(right, profile(), PROMPT, right.config.generation, mode, overlap=False)
    assert run(["simulate", "no-bundle", "--modes", f"plain,{mode}"]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_a_draft_model_that_was_left_on_disk_is_named(right: Engine) -> None:
    config = right.config.replace(drafter="ngram")
    engine = outrider.Engine(right.bundle, config, tokenizer=ToyTokenizer())
    with pytest.raises(OptionError, match="drafter='draft' was left on disk"):
        compare(engine, [Task(Prompt("a", "letters", "abc"), PROMPT)], ["plain"])


def test_the_command_line_compares_with_the_first_mode(
    right: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outrider.engine.engine.load", lambda *_, **__: right)
    monkeypatch.setattr("outrider.cli.simulate.open_model", lambda *_, **__: right.bundle)
    (tmp_path / "a.toml").write_text("".join(f"[{name}]\nrows = [1, 9]\nnear = [9, 9]\n" for name in ("main", "draft")))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n')
    given = ["--profile", str(tmp_path / "a.toml"), "--prompts", str(tmp_path / "prompts.jsonl")]
    assert run(["simulate", "toy", "--modes", "draft:2,plain", *given]) == 0
    printed = capsys.readouterr().out
    assert "vs draft:2" in printed
    assert [line.split()[-1] for line in printed.splitlines() if "draft:2 " in line and "×" in line] == ["1.00×"]
