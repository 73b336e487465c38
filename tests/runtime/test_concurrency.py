"""The benchmark of concurrent requests: what it measures, and what it refuses."""

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openvino_genai
import pytest

import outrider
from outrider.bundle import Bundle
from outrider.cli import run
from outrider.config import Config, GenerationConfig
from outrider.errors import OptionError, OutriderError
from outrider.models.backends import devices
from outrider.models.backends.devices import Device
from outrider.testing import ToyTokenizer
from outrider_bench import concurrency
from outrider_bench.concurrency import MeasuredLoad, measure, summarize
from outrider_bench.modes.mode import AnsweredLoad, Load, Run
from outrider_bench.modes.name import ModeName
from outrider_bench.modes.peers import genai, llamacpp
from outrider_bench.modes.setup import Setup
from outrider_bench.prompts import BenchPrompt
from outrider_bench.report.summary import ratio_interval
from outrider_bench.runs.workers import RunFailed

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


def test_our_requests_run_at_the_same_time(toy_engine: outrider.Engine) -> None:
    barrier = threading.Barrier(3, timeout=300)

    class Mode:
        name, runtime, description, num_parallel = "m", "outrider", "", 8

        def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
            barrier.wait()  # for the two others
            return Run([*prompt_token_ids, 7], 0.0, 1.0)

    together = concurrency._Ours(Mode(), toy_engine)
    made = together.run(Load([[1], [2], [3], [4], [5], [6]], 3), GenerationConfig(max_new_tokens=4))
    assert made.token_ids == [[i, 7] for i in range(1, 7)]
    assert made.num_tokens == 12


LLAMA_SERVER = """#!{python}
import http.server, json, sys, threading
options = dict(zip(sys.argv[1:], sys.argv[2:]))
meeting = threading.Barrier(2, timeout=300)
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        made = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(made)))
        self.end_headers()
        self.wfile.write(made)
    def do_GET(self):
        model = {{"meta": {{"n_vocab": int(open(options["--model"]).read())}}}}
        found = {{"/health": {{}}, "/props": {{"build_info": "b1"}}, "/v1/models": {{"data": [model]}}}}
        self.answer(200, found[self.path])
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["prompt"] == [0]:
            return self.answer(400, {{"error": "no prompt"}})
        if options["--parallel"] != "1":
            meeting.wait()
        length = int(options.get("--spec-draft-n-max", 0))
        self.answer(200, {{"tokens": [*asked["prompt"], asked["n_predict"], asked["ignore_eos"], length],
                          "timings": {{"predicted_ms": 0.0}}, "draft": options.get("--model-draft")}})
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


@pytest.mark.needs("POSIX")
def test_llama_cpp_gets_one_request_or_all_at_the_same_time(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, model = tmp_path / "llama-server", tmp_path / "model.gguf"
    program.write_text(LLAMA_SERVER.format(python=sys.executable))
    program.chmod(0o755)
    model.write_text(str(setup.bundle.manifest.main.vocab_size))
    monkeypatch.setenv("PATH", str(tmp_path))
    there = replace(setup, peer_models={"llamacpp": model, "llamacpp-draft": model})
    names = [ModeName.parse(name) for name in ("llamacpp", "llamacpp-ngram:4", "llamacpp-draft:2")]
    modes = llamacpp.load_together(names[:2], there)
    config = GenerationConfig(max_new_tokens=5, ignore_eos=True)
    for mode, length in zip(modes, (0, 4), strict=True):
        assert mode.run(Load([[1], [2]], 2), config).token_ids == [[1, 5, True, length], [2, 5, True, length]]
        assert "model.gguf" in mode.description
        assert "llama-server b1, 8 slots" in mode.description
    with pytest.raises(OutriderError, match="llama-server answered 400: .*no prompt"):
        modes[0].run(Load([[0]], 1), config)
    with pytest.raises(OutriderError, match="8 slots here, and 9 requests would wait"):
        modes[0].run(Load([[1]] * 9, 9), config)
    for alone, length in zip(llamacpp.load(names, there), (0, 4, 2), strict=True):
        run = alone.run([1], config)
        assert run.token_ids == [1, 5, True, length]
        assert run.first_token_seconds == run.total_seconds > 0  # the server says that decoding took nothing
    model.write_text("3")
    with pytest.raises(OptionError, match="has 3 tokens"):
        llamacpp.load_together(names[:1], there)


def test_requests_that_would_have_to_wait_are_a_failure_that_says_what_they_need(setup: Setup) -> None:
    """Otherwise a level without enough cache would be measured as a lower one."""
    small = replace(setup, config=setup.config.replace(cache_size=0.0001))
    results = concurrency.run(small, PROMPTS, ["plain"], [1, 8], repeats=2)
    assert [row["num_requests"] for row in results["summary"]] == [1]
    (failure,) = results["failures"]  # it is not tried again
    assert (failure["mode"], failure["num_requests"]) == ("plain", 8)
    assert "cache_size=0.0001 GB holds" in failure["error"]
    assert "8 requests need" in failure["error"]


def test_levels_modes_and_repeats_are_interleaved() -> None:
    ran: list[tuple[str, int, int | None]] = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, load: Load, config: GenerationConfig) -> AnsweredLoad:
            ran.append((self.name, load.at_once, config.max_new_tokens))
            if (self.name, load.at_once) == ("b", 2):
                raise RunFailed("no room")
            return AnsweredLoad(load.prompts, float(config.max_new_tokens or 0))

    modes: list[Any] = [Counted("a"), Counted("b")]
    failed: list[Any] = []
    advanced: list[None] = []
    loads = [Load([[1]], 1), Load([[1], [2]], 2)]
    config = GenerationConfig(max_new_tokens=20, min_new_tokens=15)
    measured = measure(modes, loads, config, 2, lambda *one: failed.append(one), lambda: advanced.append(None))
    warm = [("a", 1, 8), ("a", 1, 1), ("a", 1, 20), ("b", 1, 8), ("b", 1, 1), ("b", 1, 20)]
    assert ran[:6] == warm
    assert ran[6:] == [
        ("b", 2, 8), ("a", 2, 8), ("a", 2, 1), ("a", 2, 20),  # level 2 begins with the other mode, which fails
        ("b", 1, 1), ("b", 1, 20), ("a", 1, 1), ("a", 1, 20),
        ("a", 2, 1), ("a", 2, 20),
    ]  # fmt: skip
    assert failed == [("b", "no room", 2)]
    assert len(advanced) == 8
    assert {(one.read_seconds, one.batch.seconds) for one in measured} == {(1.0, 20.0)}


@pytest.mark.parametrize(("mode", "options", "message"), [
    ("ortgenai", {}, "Mode 'ortgenai' decodes one request at a time here. Leave it out"),
    ("llamacpp", {}, "needs the program llama-server on the PATH, and there is none"),
    ("genai-ngram:3/fastest", {}, "Name each instead: genai-ngram:3/f32,genai-ngram:3/bf16."),
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


def test_every_precision_is_measured_by_default(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_device", device_with("f32", "bf16"))
    chosen = replace(setup, config=setup.config.replace(precision="bf16"))
    assert concurrency.default_modes(chosen) == ["plain", "auto", "genai", "genai/f32"]
    given = replace(setup, config=setup.config.replace(main_properties={"INFERENCE_PRECISION_HINT": "f32"}))
    assert concurrency.default_modes(given) == ["plain", "auto", "genai", "genai/bf16"]
    assert concurrency.default_modes(replace(setup, config=setup.config.replace(logprobs=1))) == ["plain", "auto"]


def test_pipelines_of_openvino_genai_read_whole_prompts_in_calls_as_large_as_they_may(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, a pipeline with a SchedulerConfig reads pieces of 256 tokens; one without reads all in one call."""
    made: dict[str, tuple[Any, dict[str, Any]]] = {}

    def alone(folder: str, tokenizer: str, device: str, *, scheduler_config: Any, **more: Any) -> Any:
        made["alone"] = scheduler_config, more
        return SimpleNamespace(generate=None)

    def together(folder: str, tokenizer: str, scheduler: Any, device: str, **more: Any) -> Any:
        made["together"] = scheduler, more
        return SimpleNamespace(generate=None)

    monkeypatch.setattr(openvino_genai, "Tokenizer", str)
    monkeypatch.setattr(openvino_genai, "LLMPipeline", alone)
    monkeypatch.setattr(openvino_genai, "ContinuousBatchingPipeline", together)
    large = replace(setup, config=setup.config.replace(cache_size=2.5, max_num_batched_tokens=300))
    names = [ModeName.parse("genai-ngram:3/f32")]
    genai.load(names, large)
    genai.load_together(names, large)
    sizes = {name: scheduler.max_num_batched_tokens for name, (scheduler, _) in made.items()}
    assert sizes == {"alone": 2**64 - 1, "together": 300}
    assert made["together"][0].cache_size == 3
    for scheduler, more in made.values():
        assert not scheduler.enable_prefix_caching
        assert more == {"prompt_lookup": True, "INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}


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
