"""Traces: the viewer can read them, and they show what happened."""

import gc
import json
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import outrider
from in_the_loop import new_request
from outrider.bundle import Bundle
from outrider.cli import run
from outrider.decoding.answer import Answer
from outrider.decoding.slots import admit
from outrider.decoding.trace import Trace
from outrider.decoding.trace.events import REQUESTS
from outrider.errors import DeviceError, OptionError
from outrider.models.calls import submit
from outrider.testing import FakeBackend, ToyTokenizer
from outrider.types import Chunk, Drafter
from outrider_bench.timeline import Timeline, read_timeline, summarise
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


def timeline_of(path: Path) -> Timeline:
    """A trace as our own commands read it, which a viewer can read, too."""
    read_strictly(path)
    return read_timeline(path)


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


def make_request(main: FakeBackend, drafter: Any) -> Answer:
    """A request that has been admitted."""
    request = new_request([1, 2], drafter, max_new_tokens=40, num_assistant_tokens=2)
    assert admit(request, main)
    return request


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
    timeline = timeline_of(tmp_path / "out.json")
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
    timeline = timeline_of(tmp_path / "out.json")
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
    timeline = timeline_of(tmp_path / "out.json")
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
    lives = [span for span in timeline_of(path).of("request") if span.depth == 0]
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
