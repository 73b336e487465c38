"""The simulator: its clock by hand, its tokens the real ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import outrider
from outrider.bench.prompts import Prompt, Task
from outrider.bench.simulate import Profile, compare, read_profile, simulate
from outrider.errors import OptionError
from outrider.schedule import Contention, PassCost
from outrider.testing import ToyTokenizer, save_toy_bundle

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.bench.modes import Run
    from outrider.engine import Engine

PROMPT = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A pair whose draft model is always right."""
    bundle = save_toy_bundle(tmp_path_factory.mktemp("right"), draft_noise=0.0)
    config = outrider.Config().replace(cache_size=0.005, max_new_tokens=33, ignore_eos=True, overlap=False)
    return outrider.Engine(bundle, config, tokenizer=ToyTokenizer())


def flat(seconds: float) -> PassCost:
    return PassCost((1, 16), (seconds, seconds), (seconds, seconds))


def profile(*, draft: float = 0.1, host: float = 0.0, contention: Contention | None = None) -> Profile:
    return Profile("by hand", flat(1.0), flat(draft), contention or Contention(1.0, 1.0), host)


def decode(engine: Engine, mode: str, given: Profile, *, overlap: bool = False) -> Run:
    run = simulate(engine, given, PROMPT, engine.config.generation, mode, overlap=overlap)
    assert run.token_ids == engine.generate(PROMPT, drafter=None).token_ids
    return run


def test_plain_decoding_takes_a_check_and_the_host_for_every_token(right: Engine) -> None:
    assert decode(right, "plain", profile(host=0.25)).tokens_per_second == pytest.approx(1 / 1.25)


def test_a_draft_that_is_always_right_costs_its_steps_and_overlapped_nothing(right: Engine) -> None:
    # 32 tokens behind the first: eight rounds of three draft tokens and a bonus.
    apart = decode(right, "draft:3", profile())
    # The first draft also reads the prompt: four tokens in a call, at the same price.
    assert apart.tokens_per_second == pytest.approx(32 / (8 * 1.3))
    overlapped = decode(right, "draft:3", profile(), overlap=True)
    assert overlapped.tokens_per_second == pytest.approx(32 / (8 * 1.0 + 0.3))  # the first draft is not ahead
    assert overlapped.stats["ahead_seconds"] == 0  # the loop's own clock does not run here


def test_calls_at_the_same_time_hold_each_other_up(right: Engine) -> None:
    slow = profile(contention=Contention(check=1.5, draft=2.0))
    # Four calls ahead take 4 · 0.2 s, in which 0.8 / 1.5 s of the check are done.
    overlapped = decode(right, "draft:3", slow, overlap=True)
    rounds = [0.8 + 1 - 0.8 / 1.5] * 7 + [1.0]  # nothing is drafted behind the last round
    assert overlapped.tokens_per_second == pytest.approx(32 / (sum(rounds) + 0.3), rel=0.02)


def test_a_check_that_ends_first_waits_for_the_draft_call_under_way(right: Engine) -> None:
    overlapped = decode(right, "draft:3", profile(draft=0.7), overlap=True)
    # Two calls ahead fit: the expected token and one more, at 1.4 s; two are left to draft.
    assert overlapped.tokens_per_second == pytest.approx(32 / (8 * (1.4 + 2 * 0.7)), rel=0.1)


def test_a_machine_that_measures_itself_compares(right: Engine) -> None:
    tasks = [Task(Prompt("a", "letters", "abc"), PROMPT)]
    found, rows = compare(right, tasks, ["plain", "draft:2", "auto"])
    assert found.host > 0
    assert [row["mode"] for row in rows] == ["plain", "draft:2", "draft:2, overlapped", "auto", "auto, overlapped"]
    assert all(row["measured"] > 0 and row["predicted"] > 0 for row in rows)
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
    for wrong in (
        "[main]\n",
        f"[main]\n{calls}[draft]\n{calls}[other]\n",
        f"[main]\n{calls}[draft]\nrows=[1]\nnear=[0]",
    ):
        file.write_text(wrong)
        with pytest.raises(OptionError, match=r"Profile .*npu\.toml cannot be read"):
            read_profile(file)


def test_other_modes_are_refused(right: Engine) -> None:
    with pytest.raises(OptionError, match="'ngram' cannot be simulated: choose from plain, auto and draft:N"):
        simulate(right, profile(), PROMPT, right.config.generation, "ngram", overlap=False)
