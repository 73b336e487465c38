"""Traces: the viewer can read them, and they show what happened."""

import gc
import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from in_the_loop import new_request
from outrider.bundle import Bundle
from outrider.cli import run
from outrider.decoding.answer import Answer
from outrider.decoding.loop import step
from outrider.decoding.row_budget import RowBudget
from outrider.decoding.scheduler import Scheduler
from outrider.decoding.slots import admit
from outrider.decoding.trace import Trace
from outrider.decoding.trace.events import REQUESTS
from outrider.errors import DeviceError, OptionError, OutriderError
from outrider.models.calls import submit
from outrider.testing import FakeBackend, ToyTokenizer
from outrider.types import Chunk, Draft, Drafter
from outrider_bench.timeline import Timeline, TraceSpan, read_timeline, summarise
from toys import in_threads, load_toy

pytestmark = pytest.mark.any_format

OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "draft": {"drafter": "draft", "num_assistant_tokens": 4},
    "ngram": {"drafter": "ngram"},
    "plain": {"drafter": None},
    "sampled": {"temperature": 0.8, "seed": 1},
}


def read_strictly(path: Path) -> list[dict[str, Any]]:
    """The events of a complete trace. Checks their format, and that the spans of a lane do not overlap."""
    events: list[dict[str, Any]] = json.loads(path.read_bytes())
    opened: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    named = set()
    for event in events:
        lane = event["pid"], event["tid"]
        assert event["ph"] in "XBECM"
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("pid", "tid", "ts"))
        if event["ph"] == "M":
            named.add((*lane, event["name"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
            assert (event["pid"], 0, "process_name") in named
        else:
            assert (*lane, "thread_name") in named, "named before it is used"
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
            lanes[lane].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "B":
            opened[lane].append(event)
        elif event["ph"] == "E":
            begun = opened[lane].pop()
            assert begun["name"] == event["name"], "which the viewer wants"
            lanes[lane].append((begun["ts"], event["ts"]))
    assert not any(opened.values()), "all has ended"
    for spans in lanes.values():
        around: list[int] = []
        previous = (-1, -1)
        for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= began:
                around.pop()
            assert not around or ended <= around[-1], "they lie in each other or follow each other"
            if previous[0] == began:  # the viewer could not tell which is the outer one
                assert previous[1] == began or ended == began
            around.append(ended)
            previous = began, ended
    return events


def of_lane(timeline: Timeline, lane: str, *names: str) -> list[dict[str, Any]]:
    return [span.args for span in timeline.spans if span.lane == lane and (not names or span.name in names)]


@pytest.mark.parametrize("way", WAYS)
def test_a_trace_says_what_the_statistics_say(toy_engine: outrider.Engine, tmp_path: Path, way: str) -> None:
    path = tmp_path / "out.json"
    expected = toy_engine.generate("hello hello", **OPTIONS, **WAYS[way])
    with toy_engine.trace(path):
        result = toy_engine.generate("hello hello", **OPTIONS, **WAYS[way])
    assert result.token_ids == expected.token_ids
    events, stats = read_strictly(path), result.stats
    timeline = read_timeline(path)
    assert timeline.is_whole

    rounds = [span.args for span in timeline.rounds]
    assert [args["drafted"] for args in rounds] == stats.num_draft_tokens_per_round
    assert [args["accepted"] for args in rounds] == stats.num_accepted_tokens_per_round
    assert sum(args["tokens"] for args in of_host(timeline, "commit")) == len(result.token_ids)
    (request,) = of_lane(timeline, "request", f"request 1: {WAYS[way].get('drafter', 'auto') or 'plain'}")
    assert request["finish_reason"] == "length"
    assert (request["prompt"], request["tokens"]) == (stats.num_prompt_tokens, len(result.token_ids))
    assert [span.name for span in timeline.of("request")][1:3] == ["queued", "prompt"]

    prompt, *checks = of_lane(timeline, "main: CPU", "read", "check")
    assert prompt["rows"] == 1
    assert len(checks) == stats.num_rounds
    assert all(args["rows"] == args["tokens"] and args["sequences"] == 1 for args in checks)
    if way == "draft":
        assert sum(args["drafted"] for args in of_host(timeline, "propose")) >= stats.num_draft_tokens
        draws = [span for span in timeline.of("host", "draw") if span.depth == 1]
        assert len(draws) == len(of_lane(timeline, "draft: CPU")) >= stats.num_draft_tokens
    counters = [event for event in events if event["ph"] == "C"]
    assert [c["args"] for c in counters if c["name"] == "draft"][-1]["tokens"] == stats.num_draft_tokens_per_round[-1]
    assert [c["args"] for c in counters if c["name"] == "acceptance"][-1]["percent"] == 100 * stats.acceptance_rate


def of_host(timeline: Timeline, name: str) -> list[dict[str, Any]]:
    return [span.args for span in timeline.of("host", name)]


def test_no_text_and_no_token_gets_into_a_trace(toy_engine: outrider.Engine, tmp_path: Path) -> None:
    with toy_engine.trace(tmp_path / "out.json"):
        toy_engine.generate("hello", **OPTIONS)
    known = {
        "prompt", "limit", "tokens", "rounds", "finish_reason", "request", "drafted", "accepted", "context", "percent",
        "per second", "drafter", "sequences", "rows", "name", "sort_index", "labels",
    }  # fmt: skip
    assert {key for event in read_strictly(tmp_path / "out.json") for key in event.get("args", {})} == known


def test_nothing_of_it_is_there_unless_a_trace_runs(openvino_bundle: Bundle, tmp_path: Path) -> None:
    def objects() -> list[Any]:
        gc.collect()
        return [
            o
            for o in gc.get_objects()
            if str(type(o).__module__).startswith(("outrider.decoding.trace", "outrider.models.calls"))
        ]

    engine = load_toy(openvino_bundle)
    engine.generate("hello", **OPTIONS)
    assert not objects()
    with pytest.raises(RuntimeError), engine.trace(tmp_path / "out.json"):  # noqa: PT012
        assert [o for o in objects() if isinstance(o, Trace)]
        engine.generate("hello", **OPTIONS)
        raise RuntimeError
    assert engine.generate("hello", **OPTIONS).stats.num_generated_tokens == 40
    assert not objects()
    read_strictly(tmp_path / "out.json")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("way", ["auto", "draft"])
def test_traces_begin_and_end_while_requests_run(openvino_bundle: Bundle, tmp_path: Path, way: str) -> None:
    """They change no answer. Each trace has whole rounds, and ends all spans that it begins."""
    engine = load_toy(openvino_bundle)
    options = {"max_new_tokens": 60, "ignore_eos": True} | WAYS[way]
    prompts = ["hello hello", "world", "abc abc abc"]
    expected = [engine.generate(prompt, **options).token_ids for prompt in prompts]
    stop, wrong = threading.Event(), list[object]()

    def ask(i: int) -> None:
        while not stop.is_set():
            try:
                if engine.generate(prompts[i], **options).token_ids != expected[i]:
                    wrong.append("other tokens")
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    try:
        for i in range(40):
            begun: Any = ()
            with engine.trace(tmp_path / f"{i}.json"):
                if i == 5:
                    engine.generate(prompts[0], **options)
                elif i == 6:
                    next(begun := engine.stream(prompts[0], **options))
                else:
                    time.sleep(0.001 * (i % 20))
            list(begun)  # the answer goes on without its trace
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    timelines = []
    for i in range(40):
        read_strictly(tmp_path / f"{i}.json")
        timelines.append(read_timeline(tmp_path / f"{i}.json"))
    assert timelines[5].rounds
    assert any(span.args.get("finish_reason") == "goes on" for span in timelines[6].of("request"))


def make_request(main: FakeBackend, drafter: Any) -> Answer:
    """A request that has been admitted."""
    request = new_request([1, 2], drafter, max_new_tokens=40, num_assistant_tokens=2)
    assert admit(request, main)
    return request


def test_a_request_from_before_a_trace_is_drafted_for_beside_the_others(tmp_path: Path) -> None:
    """As without a trace, the drafter is called once for all of its requests."""
    main, drafter = FakeBackend(6), Counting()
    requests = [make_request(main, drafter) for _ in range(2)]
    models: Any = {"main": Device(6)}
    trace = Trace(tmp_path / "out.json", models)
    trace.entered(requests[1], "counting")
    for _ in range(4):
        step(main, Scheduler(main, RowBudget(512), requests), trace)
    trace.close()
    assert drafter.num_requests == [2, 2, 2]
    (life, *_) = (span for span in read_timeline(tmp_path / "out.json").of("request") if span.depth == 0)
    assert life.args["finish_reason"] == "goes on"


def test_a_request_that_leaves_twice_has_ended_once(tmp_path: Path) -> None:
    """As one that a tokenizer error ends while its end is sent. Its lane is free for one other request."""
    models: Any = {"main": Device(6)}
    trace = Trace(tmp_path / "out.json", models)
    first, second, third = (make_request(FakeBackend(6), None) for _ in range(3))
    trace.entered(first, None)
    trace.left(first)
    trace.left(first)
    trace.entered(second, None)
    trace.entered(third, None)
    trace.close()
    begun = [event for event in read_strictly(tmp_path / "out.json") if event["ph"] == "B"]
    assert len(begun) == 3
    assert len({event["tid"] for event in begun}) == 2


def test_two_traces_at_a_time_are_refused_before_a_file_is_touched(toy_engine: outrider.Engine, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with toy_engine.trace(path):
        toy_engine.generate("hello", **OPTIONS)
        with pytest.raises(OptionError, match="already"), toy_engine.trace(path):
            pass
    assert read_timeline(path).rounds


def test_what_comes_while_a_trace_is_closed_leaves_nothing_open(tmp_path: Path) -> None:
    """A request that another thread made just before, and one that ends just after."""
    models: Any = {"main": Device(6)}
    trace = Trace(tmp_path / "out.json", models)
    made, late, after = (make_request(FakeBackend(6), None) for _ in range(3))
    trace.entered(made, None)
    trace.begin(trace.lane("request", REQUESTS), "request", "just before", time.perf_counter())  # and nothing else yet
    trace.entered(late, None)
    life = trace._lives.pop(late)  # its end is under way
    trace.close()
    trace.end(life.lane, life.label, time.perf_counter())
    trace.entered(after, None)
    trace.left(after)
    events = read_strictly(tmp_path / "out.json")
    assert [event["name"] for event in events if event["ph"] == "B"] == [
        "request 1: plain", "just before", "request 2: plain",
    ]  # fmt: skip


def test_requests_at_the_same_time_have_lanes_of_their_own(toy_engine: outrider.Engine, tmp_path: Path) -> None:
    results: dict[int, outrider.Result] = {}

    def ask(i: int) -> None:
        results[i] = toy_engine.generate("hello" * (i + 1), max_new_tokens=10 + i, ignore_eos=True)

    with toy_engine.trace(tmp_path / "out.json"):
        for _ in range(2):
            in_threads(ask, range(5))
    read_strictly(tmp_path / "out.json")
    timeline = read_timeline(tmp_path / "out.json")
    lives = [span for span in timeline.of("request") if span.depth == 0]
    assert sorted(span.args["tokens"] for span in lives) == sorted(2 * [10 + i for i in range(5)])
    assert len({span.name for span in lives}) == 10
    assert len({span.lane for span in lives}) <= 5  # lanes are used again
    assert sum(args["tokens"] for args in of_host(timeline, "commit")) == 2 * sum(range(10, 15))
    checked = sum(args["rows"] for args in of_lane(timeline, "main: CPU"))
    assert checked == sum(span.args["drafted"] + 1 for span in timeline.of("request", "prompt", "round"))


class Failing(Drafter):
    """An app's drafter, which fails."""

    def propose(self, requests: Any) -> Any:
        if requests:
            raise ValueError("no draft")
        return []


class Counting(Failing):
    """A drafter that records the number of requests of each call."""

    def __init__(self) -> None:
        self.num_requests: list[int] = []

    def propose(self, requests: Any) -> Any:
        self.num_requests.append(len(requests))
        return [Draft([0]) for _ in requests]


def test_what_is_cancelled_or_fails_ends_in_the_trace(
    openvino_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_toy(openvino_bundle)
    engine.add_drafter("failing", Failing())
    cancel = threading.Event()
    with engine.trace(tmp_path / "out.json"):
        for _ in engine.stream("hello", cancel=cancel, max_new_tokens=400, ignore_eos=True):
            cancel.set()
        with pytest.raises(ValueError, match="no draft"):
            engine.generate("hello", **OPTIONS, drafter="failing")

        def fail(*_: Any) -> Any:
            raise DeviceError("gone")

        monkeypatch.setattr(engine.main, "finish", fail)
        with pytest.raises(DeviceError):
            engine.generate("hello", **OPTIONS)
        monkeypatch.undo()
        engine.stream("never read")
    read_strictly(tmp_path / "out.json")
    timeline = read_timeline(tmp_path / "out.json")
    reasons = {span.name: span.args["finish_reason"] for span in timeline.of("request") if span.depth == 0}
    assert [*reasons.values()] == ["cancelled", "DrafterError", "DeviceError", "goes on"]
    assert [args["error"] for args in of_host(timeline, "propose") if "error" in args] == ["DrafterError"]
    assert [args["error"] for args in of_lane(timeline, "main: CPU") if "error" in args] == ["DeviceError"]


def test_a_trace_that_cannot_be_written(toy_engine: outrider.Engine, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be written"), toy_engine.trace(tmp_path / "no" / "out.json"):
        pass
    odd: Any
    for odd, message in ((None, "None is no path"), ("a\0b", "no name has a null character")):
        with pytest.raises(OptionError, match=message), toy_engine.trace(odd):
            pass
    if Path("/dev/full").exists():
        with pytest.raises(OptionError, match="cannot be written"), toy_engine.trace(tmp_path / "\ud800"):
            pass
        with pytest.raises(OptionError, match="cut short"), toy_engine.trace("/dev/full"):
            assert len(toy_engine.generate("hello", **OPTIONS).token_ids) == 40
    assert len(toy_engine.generate("hello", **OPTIONS).token_ids) == 40


@pytest.mark.slow
def test_a_program_that_dies_leaves_a_trace(openvino_bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code = (
        "import os, sys, time, outrider\nfrom outrider.testing import ToyTokenizer\n"
        "engine = outrider.Engine(outrider.read_bundle(sys.argv[1]), tokenizer=ToyTokenizer())\n"
        "with engine.trace(sys.argv[2]):\n"
        "    engine.generate('hello', max_new_tokens=40, ignore_eos=True, drafter='ngram')\n"
        "    stream = engine.stream('hello', max_new_tokens=400, ignore_eos=True)\n"
        "    next(stream)\n"
        "    while b'\"round\"' not in open(sys.argv[2], 'rb').read().partition(b'request 2')[2]:\n"
        "        time.sleep(0.02)\n"
        "    os._exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(openvino_bundle.folder), str(path)], check=False)
    assert done.returncode == 3
    assert not path.read_bytes().endswith(b"]\n")
    json.loads(path.read_bytes() + b"]")  # as the format allows a reader to take it
    timeline = read_timeline(path)
    assert not timeline.is_whole
    first, second = (span for span in timeline.of("request") if span.depth == 0)
    assert first.args["tokens"] == 40
    assert "tokens" not in second.args
    assert any(span.name == "round" and span.began >= second.began for span in timeline.spans)
    path.write_bytes(path.read_bytes()[:-9])  # in the middle of a line
    assert len(read_timeline(path).spans) in (len(timeline.spans), len(timeline.spans) - 1)


@pytest.mark.every_format
def test_what_is_drafted_ahead_is_seen(toy_bundle: Bundle, tmp_path: Path) -> None:
    engine = load_toy(toy_bundle, overlap=True)
    plain = engine.generate("hello hello", **OPTIONS, drafter=None)
    with engine.trace(tmp_path / "out.json"):
        result = engine.generate("hello hello", **OPTIONS | WAYS["draft"])
    assert result.token_ids == plain.token_ids
    read_strictly(tmp_path / "out.json")
    timeline = read_timeline(tmp_path / "out.json")
    ahead = timeline.of("host", "draft ahead")
    assert ahead
    calls = [
        span.seconds
        for span in timeline.of("device", "draft")
        for around in ahead
        if around.began <= span.began and span.ended <= around.ended
    ]
    assert sum(calls) == pytest.approx(result.stats.ahead_seconds, rel=0.1, abs=1e-4)
    assert summarise(timeline)["both"] <= sum(calls) / summarise(timeline)["seconds"] + 1e-3


class Device(FakeBackend):
    """A device whose calls end when the test says so, whether or not anything waits."""

    device = "CPU"

    def submit(self, chunks: Sequence[Chunk]) -> Any:
        self.began = time.perf_counter()
        return super().submit(chunks)

    def finish(self) -> None:
        self.seconds += time.perf_counter() - self.began


def test_calls_on_two_devices_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1.0]
    for name in ("time.perf_counter", "outrider.decoding.trace.recorder._now", "outrider.models.calls._now"):
        monkeypatch.setattr(name, lambda: clock[0])
    main, draft = Device(8), Device(8)
    draft.device = "NPU"
    models: Any = {"main": main, "draft": draft}
    trace = Trace(tmp_path / "out.json", models)
    check = submit(main, [Chunk(main.open(10), [1, 2], num_rows=2)], trace)
    slot = draft.open(10)
    for _ in range(2):
        clock[0] += 0.001
        call = submit(draft, [Chunk(slot, [1, 2], num_rows=2)], trace)
        clock[0] += 0.01
        draft.finish()
        call.wait()
    clock[0] += 0.001
    main.finish()
    clock[0] += 0.1  # the host comes late
    check.wait()
    trace.close()
    read_strictly(tmp_path / "out.json")
    timeline = read_timeline(tmp_path / "out.json")
    (checked,) = timeline.of("device", "check")
    first, second = timeline.of("device", "draft")
    assert checked.seconds == pytest.approx(main.seconds, abs=1e-5)
    assert checked.ended < timeline.of("host", "wait")[-1].ended - 0.05, "when the device was done, not the host"
    assert checked.began < first.began < first.ended <= second.began < second.ended < checked.ended
    assert first.lane == "draft: NPU"
    assert summarise(timeline)["rounds"] == 0


def test_the_summary_accounts_for_all_time(toy_engine: outrider.Engine, tmp_path: Path) -> None:
    with toy_engine.trace(tmp_path / "out.json"):
        results = [
            toy_engine.generate("hello", **OPTIONS | WAYS[way] | {"max_new_tokens": 150}) for way in ("draft", "plain")
        ]
    summary = summarise(read_timeline(tmp_path / "out.json"))
    assert summary["rounds"] == sum(result.stats.num_rounds for result in results)
    assert summary["drafted"] == sum(result.stats.num_draft_tokens for result in results)
    assert summary["accepted"] == sum(result.stats.num_accepted_tokens for result in results)
    assert summary["tokens"] == 2 * 149  # the first comes with the prompt
    shares = [device["share"] for device in summary["devices"].values()]
    assert sum(shares) + sum(summary["host"].values()) - summary["both"] == pytest.approx(1)
    assert summary["seconds"] == pytest.approx(sum(result.stats.decode_seconds for result in results), rel=0.5)
    assert summary["devices"]["main: CPU"]["calls"] == summary["rounds"]
    busy = sum(result.stats.check_seconds for result in results) / summary["seconds"]
    assert summary["devices"]["main: CPU"]["share"] == pytest.approx(busy, rel=0.1)
    assert summary["gap_milliseconds"] > 0


def test_the_command_line(
    openvino_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(_: str, config: outrider.Config) -> outrider.Engine:
        return outrider.Engine(openvino_bundle, config, tokenizer=ToyTokenizer())

    path = tmp_path / "out.json"
    monkeypatch.setattr("outrider.engine.engine.load", load)  # a toy has no tokenizer of its own
    monkeypatch.setattr("outrider.cli.generate.open_model", lambda *_, **__: openvino_bundle)
    arguments = ["generate", "toy", "hello hello", "--max-new-tokens", "30", "--drafter", "draft", "--ignore-eos"]
    assert run([*arguments, "--trace", str(path), "--compare", "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert str(path) in printed.err
    read_strictly(path)
    lives = [span for span in read_timeline(path).of("request") if span.depth == 0]
    assert [span.name for span in lives] == ["request 1: draft", "request 2: plain"]
    assert [span.args["tokens"] for span in lives] == 2 * [len(result["token_ids"])]
    assert run(["trace", str(path)]) == 0
    assert "main: CPU" in capsys.readouterr().out
    assert run(["trace", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == len(read_timeline(path).rounds)


def test_a_trace_may_have_no_round(
    toy_engine: outrider.Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with toy_engine.trace(tmp_path / "out.json"):
        pass
    assert run(["trace", str(tmp_path / "out.json")]) == 0
    assert "This trace has no round of decoding" in capsys.readouterr().out


def test_gaps_are_those_within_a_draft() -> None:
    proposals = [TraceSpan("host", "host", "propose", at, at + 1.0) for at in (0.0, 2.0, 4.0)]
    calls = [(0.0, 0.25), (0.5, 1.0), (1.5, 1.75), (2.0, 2.5), (3.0, 3.5), (4.125, 4.25)]
    drafts = [TraceSpan("draft: CPU", "device", "draft", began, ended) for began, ended in calls]
    timeline = Timeline(sorted([*proposals, *drafts], key=lambda span: span.began), is_whole=True)
    assert summarise(timeline)["gap_milliseconds"] == 250


def test_numbers_of_numpys_are_written(tmp_path: Path) -> None:
    """An app's drafter may use them."""
    trace = Trace(tmp_path / "out.json", {})
    trace.count("odd", 0.0, value=np.int64(3))  # type: ignore[arg-type]
    trace.close()
    read_strictly(tmp_path / "out.json")
    assert read_timeline(tmp_path / "out.json").is_whole


def test_an_event_that_cannot_be_written_is_told_at_the_end(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "out.json", {})
    trace.count("odd", 0.0, value=object())  # type: ignore[arg-type]
    with pytest.raises(OutriderError, match="is cut short: <object object at .* is no number"):
        trace.close()
