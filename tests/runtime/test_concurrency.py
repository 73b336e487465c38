"""The benchmark of concurrent requests: what it measures, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.bundle import Bundle
from outrider.cli import run
from outrider.config import Config
from outrider.errors import OptionError
from outrider.models.backends import devices
from outrider.models.backends.devices import Device
from outrider.testing import ToyTokenizer
from outrider_bench import concurrency
from outrider_bench.concurrency import MeasuredLoad, summarize
from outrider_bench.modes.mode import AnsweredLoad
from outrider_bench.modes.setup import Setup
from outrider_bench.prompts import BenchPrompt
from outrider_bench.report.summary import ratio_interval

pytestmark = pytest.mark.any_format

PROMPTS = [
    BenchPrompt("one", "letters", "hello"),
    BenchPrompt("two", "letters", "abc abc"),
    BenchPrompt("three", "digits", "1 2 1 2"),
]


@pytest.fixture
def setup(openvino_bundle: Bundle) -> Setup:
    config = Config().replace(cache_size=0.005, max_new_tokens=12, num_threads=1)
    return Setup(openvino_bundle, config, tokenizer=ToyTokenizer())


@pytest.mark.slow
def test_all_requests_of_a_level_have_the_text_that_they_have_alone(setup: Setup) -> None:
    results = concurrency.run(setup, PROMPTS, ["plain", "draft:3"], [1, 4], repeats=2)
    assert results["failures"] == []
    assert [(row["num_requests"], row["mode"]) for row in results["summary"]] == [
        (1, "plain"), (1, "draft:3"), (4, "plain"), (4, "draft:3"),
    ]  # fmt: skip
    assert all(row["identical"] == row["num_answers"] for row in results["summary"])
    engine = outrider.Engine(setup.bundle, setup.config, tokenizer=ToyTokenizer())
    alone = [engine.generate(prompt.text, drafter=None, ignore_eos=True).token_ids for prompt in PROMPTS]
    assert len(results["runs"]) == 2 * 2 * 2
    for one in results["runs"]:
        assert one["token_ids"] == (alone if one["num_requests"] == 1 else [*alone, alone[0]])  # prompts repeat
        assert {len(token_ids) for token_ids in one["token_ids"]} == {12}
        assert one["seconds"] > 0
        assert one["read_seconds"] > 0


def batch(seconds: float, *token_ids: list[int]) -> AnsweredLoad:
    return AnsweredLoad(list(token_ids), seconds)


def test_a_summary_is_what_one_gets_by_hand() -> None:
    texts = [1] * 11, [2] * 11
    measured = [
        MeasuredLoad("plain", 2, 0, batch(3.0, *texts), 1.0),  # 20 tokens in 2 seconds
        MeasuredLoad("plain", 2, 1, batch(6.0, *texts), 2.0),
        MeasuredLoad("fast", 2, 0, batch(2.0, *texts), 1.0),
        MeasuredLoad("fast", 2, 1, batch(3.0, [1] * 11, [3] * 11), 1.0),
        MeasuredLoad("plain", 1, 0, batch(2.0, texts[0]), 1.0),
        MeasuredLoad("fast", 1, 0, batch(1.0, texts[0]), 1.5),  # reading took longer than all
    ]
    one, other, plain, fast = summarize(measured, [1, 2], ["plain", "fast", "dead"])
    assert (plain["mode"], plain["num_requests"], plain["speed_up"], plain["identical"]) == ("plain", 2, 1, 2)
    assert plain["tokens_per_second"] == pytest.approx((10 + 5) / 2)
    assert plain["tokens_per_second_range"] == (5, 10)
    assert fast["speed_up"] == pytest.approx(2)  # 20 / 10 and 10 / 5
    assert fast["speed_up_interval"] == pytest.approx(ratio_interval([2.0, 2.0]))
    assert fast["end_to_end"] == pytest.approx((3 / 2 * 6 / 3) ** 0.5)
    assert fast["end_to_end_tokens_per_second"] == pytest.approx((22 / 2 + 22 / 3) / 2)
    assert fast["identical"] == 1  # the second text differed in one repeat
    assert (one["tokens_per_second"], one["speed_up"]) == (10, 1)
    assert (other["tokens_per_second"], other["speed_up"], other["end_to_end"]) == (0, None, 2)


def test_requests_that_would_have_to_wait_are_a_failure_that_says_what_they_need(setup: Setup) -> None:
    """Otherwise a level without enough cache would be measured as a lower one."""
    small = replace(setup, config=setup.config.replace(cache_size=0.0001))
    results = concurrency.run(small, PROMPTS, ["plain"], [1, 8], repeats=2)
    assert [row["num_requests"] for row in results["summary"]] == [1]
    (failure,) = results["failures"]  # it is not tried again
    assert (failure["mode"], failure["num_requests"]) == ("plain", 8)
    assert "cache_size=0.0001 GB holds" in failure["error"]
    assert "8 requests need" in failure["error"]


@pytest.mark.parametrize(("mode", "options", "message"), [
    ("ortgenai", {}, "Mode 'ortgenai' decodes one request at a time here. Leave it out"),
    ("llamacpp", {}, "needs the program llama-server on the PATH, and there is none"),
    ("auto@other", {}, "give it as --peer-model other=FOLDER"),
    ("auto", {"stop": "x"}, "--stop would end some answers early"),
    ("auto", {"stop_token_ids": (3,)}, "--stop would end some answers early"),
    ("auto", {"max_new_tokens": 1}, "max_new_tokens=1 leaves no token to decode after the first. Give 2 or more."),
    ("auto", {"answer_store": "answers"}, "would let a run copy from the run before it"),
])  # fmt: skip
def test_what_cannot_be_compared_is_said_before_anything_runs(
    mode: str, options: dict[str, Any], message: str, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "find_device", device_with("f32", "bf16"))
    monkeypatch.setenv("PATH", "")
    changed = replace(setup, config=setup.config.replace(**options))
    with pytest.raises(OptionError, match=message):
        concurrency.run(changed, PROMPTS, ["plain", mode], [1])


def device_with(*precisions: str) -> Any:
    return lambda name, _: Device(name=name, format="openvino", full_name=name, precisions=precisions)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--concurrency", "1,x"], "'1,x' is not a list of numbers of requests, such as 1,2,4,8."),
    (["--concurrency", "0"], "'0' is not a list of numbers of requests"),
    (["--concurrency", "2", "--quick"], "--concurrency and --quick cannot be combined."),
    (["--concurrency", "2", "--out", "x"], "--concurrency and --out cannot be combined."),
])  # fmt: skip
def test_bad_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "nowhere", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_openvino_genai_decodes_several_at_a_time(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All requests of all modes have the same number of tokens, past the end of the answer."""
    arguments = ["bench", str(tiny), "--concurrency", "3,1", "--max-new-tokens", "6", "--repeats", "1"]
    arguments += ["--modes", "plain,genai/f32,genai-ngram:2"]
    assert run([*arguments, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["failures"] == []
    assert [(row["num_requests"], row["mode"]) for row in results["summary"]] == [
        (level, mode) for level in (1, 3) for mode in ("plain", "genai/f32", "genai-ngram:2")
    ]
    for one in results["runs"]:
        assert [len(token_ids) for token_ids in one["token_ids"]] == [6] * {1: 4, 3: 6}[one["num_requests"]]
    assert "CPU f32, cache" in results["modes"][1]["description"]
    assert results["setting"]["concurrency"] == [1, 3]
    assert (
        run([*arguments[:2], "--concurrency", "2", "--max-new-tokens", "2", "--modes", "plain", "--repeats", "2"]) == 0
    )
    printed = capsys.readouterr().out
    assert "requests" in printed
    assert "1.00×" in printed
