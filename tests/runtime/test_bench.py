"""The benchmark: its figures, its workers, interruptions, and its report."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from outrider.bundle import Bundle
from outrider.cli import run
from outrider.config import Config, GenerationConfig
from outrider.engine.engine import Engine
from outrider.errors import DeviceWarning, OptionError, OutriderError
from outrider.models.backends import devices
from outrider.models.backends.devices import Device
from outrider.models.backends.processor import find_processor
from outrider.testing import ToyTokenizer
from outrider_bench import benchmark
from outrider_bench.modes.make import default_modes, default_peers, make_modes
from outrider_bench.modes.mode import Mode, Run
from outrider_bench.modes.name import ModeName, split_modes
from outrider_bench.modes.peers.check import check_peer, follow_options
from outrider_bench.modes.setup import Setup
from outrider_bench.prompts import BenchPrompt, Task, encode_prompts, read_prompts
from outrider_bench.report import page as report
from outrider_bench.report.summary import (
    collect,
    median_ratio,
    profile,
    quartiles,
    ratio_interval,
    summarize,
    summarize_prompts,
)
from outrider_bench.runs.measure import FEWEST_TOKENS, RunRecord, TimeBudget, layers, measure
from outrider_bench.runs.run_folder import RunFolder
from outrider_bench.runs.workers import BenchWorker, RunFailed, start_workers

pytestmark = pytest.mark.any_format

PROMPTS = [
    BenchPrompt("one", "letters", "hello"),
    BenchPrompt("two", "letters", "abc abc"),
    BenchPrompt("three", "digits", "1 2 1 2"),
]
GENERATION = GenerationConfig(max_new_tokens=8)


@pytest.fixture
def setup(openvino_bundle: Bundle) -> Setup:
    config = Config().replace(cache_size=0.005, max_new_tokens=8, num_threads=1)
    return Setup(openvino_bundle, config, tokenizer=ToyTokenizer())


@pytest.fixture
def worker(setup: Setup, tmp_path: Path) -> Iterator[BenchWorker]:
    made = BenchWorker(["plain", "draft:3"], setup, tmp_path / "log")
    yield made
    made.close()


# --- statistics, against figures by hand -------------------------------------------------------------------------


def run_of(num_tokens: int, first: float, total: float, **stats: Any) -> Run:
    return Run(list(range(num_tokens)), first, total, stats)


def test_an_interval_is_students() -> None:
    low, high = ratio_interval([1.0, 2.0]) or (0, 0)
    # Logs 0 and ln 2: mean 0.34657, deviation 0.49013, t of one degree 12.706.
    margin = 12.706 * 0.4901291 / math.sqrt(2)
    assert (math.log(low), math.log(high)) == pytest.approx((0.3465736 - margin, 0.3465736 + margin), rel=1e-6)
    assert ratio_interval([1.5]) is None
    assert ratio_interval([2.0, 2.0, 2.0]) == pytest.approx((2, 2))
    low, high = ratio_interval([1.0, 2.0] * 20) or (0, 0)
    assert 1.0 < low < math.sqrt(2) < high < 2.0


def test_a_run_that_was_held_up_counts_for_little() -> None:
    assert median_ratio([1.2, 0.01, 1.3]) == pytest.approx(1.2)
    assert median_ratio([1.0, 4.0]) == pytest.approx(2.0)
    assert median_ratio([]) is None
    assert report.span((0.9, 1.2)) == "0.90–1.20"
    assert report.span((0.001, 300.0)) == "wide"
    assert report.span(None) == "-"


def test_quartiles_are_numpys() -> None:
    values = [3.0, 1.0, 4.0, 1.5, 9.0]
    assert quartiles(values) == pytest.approx(tuple(np.quantile(values, [0.25, 0.75])))
    assert quartiles([2.0]) == (2.0, 2.0)


def made_up() -> tuple[list[Task], list[RunRecord]]:
    """Two prompts, two repeats, two modes: the second is faster on one prompt, and slower on the other."""
    tasks = [Task(BenchPrompt("a", "x", "a"), [1]), Task(BenchPrompt("b", "y", "b"), [1, 2])]
    seconds = {  # decoding of ten tokens after the first
        (0, "slow"): (1.0, 2.0),
        (0, "fast"): (0.5, 0.5),
        (1, "slow"): (1.0, 1.0),
        (1, "fast"): (2.0, 2.0),
    }
    records = [
        RunRecord(number, mode, repeat, run_of(11, 1.0, 1.0 + taken))
        for (number, mode), pair in seconds.items()
        for repeat, taken in enumerate(pair)
    ]
    return tasks, records


def test_a_summary_is_what_one_gets_by_hand() -> None:
    tasks, records = made_up()
    rows = {(row["mode"], row["category"]): row for row in summarize(collect(records), tasks, ["slow", "fast"], "slow")}
    fast = rows["fast", "x"]
    assert fast["speed_up"] == pytest.approx(math.sqrt(2 * 4))  # 1 / 0.5 and 2 / 0.5
    assert fast["tokens_per_second"] == pytest.approx(20)
    assert fast["end_to_end"] == pytest.approx(math.sqrt(2 / 1.5 * 3 / 1.5))
    assert (fast["first_token_seconds"], fast["reading"]) == (pytest.approx(1), pytest.approx(1))
    assert fast["speed_up_interval"] == pytest.approx(ratio_interval([2.0, 4.0]))
    assert rows["slow", "x"]["tokens_per_second"] == pytest.approx((10 + 5) / 2)
    whole = rows["fast", "all"]
    assert whole["speed_up"] == pytest.approx(math.sqrt(math.sqrt(8) * 0.5))
    assert whole["slowest"] == pytest.approx(0.5)
    assert whole["speed_up_interval"] == pytest.approx(ratio_interval([math.sqrt(2 * 0.5), math.sqrt(4 * 0.5)]))
    assert whole["identical"] == whole["num_prompts"] == 2
    assert rows["slow", "all"]["speed_up"] == 1


def test_what_differs_is_not_identical_and_what_failed_is_left_out() -> None:
    tasks, records = made_up()
    records[2] = RunRecord(0, "fast", 0, Run([5] * 11, 0.5, 1.5))
    records[6:] = [RunRecord(1, "fast", repeat, None, "no") for repeat in (0, 1)]
    rows = {(row["mode"], row["category"]): row for row in summarize(collect(records), tasks, ["slow", "fast"], "slow")}
    assert rows["fast", "x"]["identical"] == 0
    assert rows["fast", "x"]["reading"] == pytest.approx(math.sqrt(2))  # the median of 2 and 1
    assert ("fast", "y") not in rows
    assert rows["fast", "all"]["num_prompts"] == 1
    prompts = summarize_prompts(collect(records), tasks, ["slow", "fast"], "slow")
    assert [(row["id"], row["mode"]) for row in prompts] == [("a", "slow"), ("a", "fast"), ("b", "slow")]


def test_a_single_token_has_no_speed() -> None:
    tasks = [Task(BenchPrompt("a", "x", "a"), [1])]
    records = [RunRecord(0, mode, 0, run_of(1, 1.0, 1.0)) for mode in ("slow", "fast")]
    (_, row) = summarize(collect(records), tasks, ["slow", "fast"], "slow")
    assert row["speed_up"] is None
    assert row["end_to_end"] == 1
    assert report.cells(row)[2] == "-"


def test_a_profile_counts_positions_and_rounds() -> None:
    def stats(drafted: list[int], accepted: list[int], per_position: list[int]) -> dict[str, Any]:
        return {
            "num_drafts": sum(n > 0 for n in drafted),
            "num_generated_tokens": 1 + len(drafted) + sum(accepted),
            "num_accepted_tokens_per_position": per_position,
            "num_draft_tokens_per_round": drafted,
            "num_accepted_tokens_per_round": accepted,
            "draft_seconds": 1.0, "check_seconds": 2.0, "host_seconds": 0.5,
        }  # fmt: skip

    records = [
        RunRecord(0, "m", 0, Run([1], 0, 1, stats([3, 3], [2, 0], [1, 1, 0]))),
        RunRecord(1, "m", 0, Run([1], 0, 1, stats([1], [1], [1]))),
        RunRecord(0, "peer", 0, Run([1], 0, 1)),
    ]
    made = profile(collect(records), ["m", "peer"])
    assert list(made) == ["m"]
    assert made["m"]["accepted_by_position"] == pytest.approx([2 / 3, 1 / 3, 0])
    assert made["m"]["milliseconds_per_token"]["check"] == pytest.approx((2000 / 4 + 2000 / 2) / 2)


# --- what is run, and in which order -----------------------------------------------------------------------------


def test_every_layer_has_a_prompt_of_every_category() -> None:
    tasks = [Task(prompt, [1]) for prompt in PROMPTS]
    assert layers(tasks, 2) == [[(0, 0), (2, 0)], [(1, 0)], [(0, 1), (2, 1)], [(1, 1)]]


class Counted:
    """A mode whose runs take fixed seconds of a fake clock."""

    runtime, description, num_parallel = "outrider", "", 1

    def __init__(self, name: str, clock: list[float], seconds: float) -> None:
        self.name, self._clock, self._seconds = name, clock, seconds
        self.configs: list[Any] = []
        self.slower = 0.0

    def run(self, prompt_token_ids: list[int], config: GenerationConfig) -> Run:
        self._clock[0] += self._seconds
        self._seconds += self.slower
        self.configs.append(config)
        return Run(prompt_token_ids, 0.0, 1.0)


def test_quick_cuts_prompts_evenly_and_ends_in_time() -> None:
    clock = [100.0]
    tasks = [Task(BenchPrompt(f"{c}{n}", c, "p"), [n]) for c in "abc" for n in range(10)]
    modes: list[Mode] = [Counted("slow", clock, 7.0), Counted("fast", clock, 3.0)]
    records = measure(modes, tasks, GENERATION, 3, budget=TimeBudget(200, lambda: clock[0]))
    # A layer is three prompts in two modes: 30 seconds. Six of them fit.
    assert clock[0] == 280.0
    assert sorted({record.number for record in records}) == [n + 10 * c for c in range(3) for n in range(6)]
    cut = benchmark.describe_cut(records, tasks, 3, 64, 48)
    assert (
        cut == "To end in time: 48 new tokens instead of 64; prompts a 6 of 10, b 6 of 10, c 6 of 10; 1 of 3 repeats."
    )


def test_quick_cuts_repeats_first() -> None:
    clock = [0.0]
    tasks = [Task(prompt, [1]) for prompt in PROMPTS]
    records = measure([Counted("m", clock, 1.0)], tasks, GENERATION, 3, budget=TimeBudget(8.5, lambda: clock[0]))
    assert {record.repeat for record in records if record.number == 0} == {0, 1, 2}
    assert benchmark.describe_cut(records, tasks, 3, 8, 8) == "To end in time: 2 of 3 repeats of some prompts."
    everything = measure([Counted("m", clock, 1.0)], tasks, GENERATION, 3, budget=TimeBudget(20, lambda: clock[0]))
    assert len(everything) == 9
    assert benchmark.describe_cut(everything, tasks, 3, 8, 8) is None


def test_quick_runs_one_of_each_category_whatever_it_takes() -> None:
    clock = [0.0]
    tasks = [Task(prompt, [1]) for prompt in PROMPTS]
    records = measure([Counted("m", clock, 99.0)], tasks, GENERATION, budget=TimeBudget(10, lambda: clock[0]))
    assert [record.number for record in records] == [0, 2]


def test_quick_ends_within_a_layer_when_the_machine_becomes_slower() -> None:
    clock = [0.0]
    tasks = [Task(BenchPrompt(c, c, "p"), [0]) for c in "abcd"]
    mode = Counted("m", clock, 1.0)
    mode.slower = 3.0  # seconds more for every run
    records = measure([mode], tasks, GENERATION, 9, budget=TimeBudget(50, lambda: clock[0]))
    assert len(records) == 6  # 1, 4, 7, 10, then 13 and 16 seconds: two of the second layer
    assert clock[0] == 51


def test_quick_shortens_answers_where_even_that_takes_too_long() -> None:
    budget = TimeBudget(600, lambda: 0.0)
    assert budget.choose_tokens(64, warm_up_seconds=10, num_prompts=6) == 64
    assert budget.choose_tokens(64, warm_up_seconds=100, num_prompts=6) == 32
    assert budget.choose_tokens(64, warm_up_seconds=1e6, num_prompts=6) == FEWEST_TOKENS
    assert budget.choose_tokens(8, warm_up_seconds=1e6, num_prompts=6) == 8


def test_references_reach_our_modes_only(tmp_path: Path) -> None:
    class AnyOptions:
        def __init__(self, **options: Any) -> None:
            self.options = options

        def replace(self, **options: Any) -> "AnyOptions":
            return AnyOptions(**options)

    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "references": ["one", "two"]}\n{"prompt": "b"}\n')
    tasks = encode_prompts(read_prompts(path), ToyTokenizer())
    ours, theirs = Counted("ours", [0.0], 0), Counted("theirs", [0.0], 0)
    theirs.runtime = "peer"
    config: Any = AnyOptions()
    measure([ours, theirs], tasks, config)
    assert [config.options for config in ours.configs] == [{"references": ("one", "two")}, {}]
    assert [config.options for config in theirs.configs] == [{}, {}]
    path.write_text('{"prompt": "a", "references": "one"}\n')
    with pytest.raises(OptionError, match="line 1, has 'references' that are not a list of texts"):
        read_prompts(path)


def test_the_grounded_prompts_hold_what_they_refer_to() -> None:
    prompts = read_prompts("grounded")
    assert len({prompt.id for prompt in prompts}) == 10
    for prompt in prompts:
        (reference,) = prompt.references
        assert prompt.category == "grounded"
        assert 300 <= len(reference.split()) <= 600
        assert reference in prompt.text
        assert len(prompt.text) > len(reference) + 40
    assert read_prompts("default") == read_prompts()


def test_the_open_prompts_have_nothing_to_copy() -> None:
    prompts = read_prompts("open")
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(
        ("general", "writing", "chinese", "chinese-writing"), 50
    )
    assert len({prompt.text for prompt in prompts}) == 200
    assert max(len(prompt.text) for prompt in prompts) < 80


def test_long_prompts_are_the_grounded_ones_after_other_documents() -> None:
    grounded, prompts = read_prompts("grounded"), read_prompts("long")
    assert len(prompts) == 4 * len(grounded)
    assert all(
        prompt.text.endswith(grounded[i % 10].text) and not prompt.references for i, prompt in enumerate(prompts)
    )
    assert [prompt.id for prompt in read_prompts("long", 1)] == [f"ferry-{n}" for n in (1, 4, 8, 16)]
    lengths = [len(prompt.text) for prompt in read_prompts("long", 1)]
    assert all(longer > 1.8 * shorter for shorter, longer in itertools.pairwise(lengths))


# --- modes -------------------------------------------------------------------------------------------------------


def test_names_are_taken_apart() -> None:
    assert ModeName.parse("draft:3") == ModeName("draft:3", "draft", 3)
    assert ModeName.parse("genai-dynamic:.5").number == 0.5
    assert ModeName.parse("ngram").num_assistant_tokens is None
    assert [ModeName.parse(name).worker for name in ("auto", "genai-draft", "genai-dynamic", "genai")] == [
        "outrider", "genai-draft", "genai-draft", "genai",
    ]  # fmt: skip
    assert ModeName.parse("draft:3@other") == ModeName("draft:3@other", "draft", 3, "other")
    assert ModeName.parse("auto@other").worker != ModeName.parse("auto").worker
    assert ModeName.parse("genai-draft:3/f32") == ModeName("genai-draft:3/f32", "genai-draft", 3, precision="f32")
    assert ModeName.parse("auto@f32").bundle == "f32"
    workers = [ModeName.parse(name).worker for name in ("genai", "genai/f32", "genai/bf16", "genai-ngram/f32")]
    assert len({*workers}) == 4
    assert not any("/" in worker for worker in workers)  # a log file is called so
    for wrong in ("", ":3", "draft:", "draft:x", "draft:0.5", "auto@", "@other", "genai/", "/f32"):
        with pytest.raises(OptionError, match=f"There is no mode '{wrong}'"):
            split_modes(wrong)
    with pytest.raises(OptionError, match="'plain' is given twice"):
        split_modes("plain, ngram, plain")


def test_without_a_number_the_default_length_stands(toy_engine: Engine) -> None:
    default, one, auto = make_modes(["draft", "draft:1", "auto"], toy_engine)
    prompt = toy_engine.tokenizer.encode_prompt("abc abc")
    for mode, wanted, longest in ((default, 2, 2), (default, 4, 4), (one, 4, 1), (auto, 2, 2)):
        config = GENERATION.replace(ignore_eos=True, num_assistant_tokens=wanted)
        assert max(mode.run(prompt, config).stats["num_draft_tokens_per_round"]) == longest
    assert default.description.startswith("main model fp32, CPU")
    assert "draft model fp32" in default.description


def test_a_run_does_not_copy_from_the_run_before_it(toy_engine: Engine) -> None:
    """A mode would recite a prompt's answer, which another mode or repeat gave."""
    prompt, config = toy_engine.tokenizer.encode_prompt("abc"), GENERATION.replace(max_new_tokens=24, ignore_eos=True)
    num_rounds = {}
    for forgets in (True, False):
        (mode,) = make_modes(["suffix:4"], toy_engine, forgets=forgets)
        num_rounds[forgets] = [mode.run(prompt, config).stats["num_rounds"] for _ in range(2)]
    assert num_rounds[True][0] == num_rounds[True][1]
    assert num_rounds[False][1] < num_rounds[True][0]


@pytest.mark.parametrize(("mode", "message"), [
    ("genai-draft", "needs a draft model"),
    ("genai-eagle3:3", "a folder that bench/scripts/peer_draft.py wrote as --peer-model genai-eagle3=PATH"),
    ("llamacpp-draft", "needs the program llama-server on the PATH"),
    ("ortgenai", r'not installed. Run: pip install "outrider\[bench\]"'),
    ("auto@other", "needs a bundle: give it as --peer-model other=FOLDER"),
    ("genai@other", "only Outrider's modes can have another bundle"),
    ("draft:3/f32", "only openvino-genai's modes name a precision, as genai/f32. Outrider's use --precision"),
    ("genai/f64", "names no precision: write one of f32, bf16, f16 after the slash"),
])  # fmt: skip
def test_what_a_peer_misses_is_said_before_anything_runs(
    mode: str, message: str, openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)  # as if it was not installed
    monkeypatch.setenv("PATH", "")
    alone = replace(openvino_bundle, manifest=msgspec.structs.replace(openvino_bundle.manifest, drafters=()))
    with pytest.raises(OptionError, match=message):
        benchmark.run(Setup(alone, Config()), PROMPTS, ["plain", mode])


def device_with(*precisions: str) -> Callable[..., Device]:
    return lambda name, _: Device(name=name, format="openvino", full_name=name, precisions=precisions)


def test_a_precision_is_one_that_the_devices_have(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another precision a device uses its default, and the report would name the wrong one."""
    monkeypatch.setattr(devices, "find_device", device_with("f32", "bf16", "int8"))
    for name in ("genai/f32", "genai-ngram:3/bf16", "genai-draft:3/f32"):
        check_peer(ModeName.parse(name), setup)
    with pytest.raises(OptionError, match="no support for f16 on CPU. Choose from f32, bf16."):
        check_peer(ModeName.parse("genai/f16"), setup)
    monkeypatch.setattr(devices, "find_device", lambda *_: None)
    with pytest.raises(OptionError, match="no support for any of f32, bf16, f16 on CPU. Leave the precision out."):
        check_peer(ModeName.parse("genai/f32"), setup)

    def find(name: str, _: str) -> Device:
        return device_with("f32", "f16" if name == "GPU" else "bf16")(name, _)

    monkeypatch.setattr(devices, "find_device", find)
    two = replace(setup, config=setup.config.replace(draft_device="GPU"))
    check_peer(ModeName.parse("genai/bf16"), two)  # genai has no draft model
    with pytest.raises(OptionError, match="no support for bf16 on CPU and GPU. Choose from f32."):
        check_peer(ModeName.parse("genai-draft:3/bf16"), two)


def test_openvino_genai_is_compared_with_by_default_where_it_can_be(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "find_device", device_with("f32", "bf16"))
    setup = replace(setup, config=setup.config.replace(precision="f32"))
    assert default_modes(setup, together=True) == ["plain", "auto", "genai", "genai/bf16"]
    assert default_modes(setup)[:2] == ["plain", "auto"]
    assert default_modes(setup)[-2:] == default_peers(setup) == ["genai", "genai/bf16"]
    assert default_peers(replace(setup, config=setup.config.replace(logprobs=2))) == []  # it has no logprobs
    main = msgspec.structs.replace(setup.bundle.manifest.main, format="onnx")
    onnx = replace(setup.bundle, manifest=msgspec.structs.replace(setup.bundle.manifest, main=main))
    assert default_peers(replace(setup, bundle=onnx)) == []
    monkeypatch.setattr(devices, "find_device", device_with("f32"))
    assert default_peers(setup) == ["genai"]


def test_a_peers_model_that_is_not_there_is_said_before_devices_are_tried(
    openvino_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "outrider.models.tuning.placement.choose_devices", lambda *_, **__: pytest.fail("devices are tried")
    )
    given = ["--main-device", "auto", "--modes", "plain,auto@other", "--peer-model", f"other={tmp_path / 'nowhere'}"]
    assert run(["bench", str(openvino_bundle.folder), *given]) == 1
    assert f"There is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err


def test_another_bundle_is_compared_in_the_same_run(setup: Setup, smollm2: Path) -> None:
    both = replace(setup, peer_models={"other": setup.bundle.folder, "real": smollm2})
    results = benchmark.run(both, PROMPTS[:1], ["plain", "draft:2@other"])
    assert [mode["name"] for mode in results["modes"]] == ["plain", "draft:2@other"]
    plain, other = results["runs"]
    assert other["token_ids"] == plain["token_ids"]
    assert max(other["stats"]["num_draft_tokens_per_round"]) == 2
    with pytest.raises(OptionError, match="has other tokens than .* Leave mode 'auto@real' out"):
        benchmark.run(both, PROMPTS[:1], ["plain", "auto@real"])


def test_runs_cannot_copy_from_one_another(setup: Setup) -> None:
    stored = replace(setup, config=setup.config.replace(answer_store="answers"))
    with pytest.raises(OptionError, match="would let a run copy from the run before it"):
        benchmark.run(stored, PROMPTS, ["plain", "suffix"])


def test_a_peer_is_not_asked_for_what_it_lacks() -> None:
    config = GenerationConfig(temperature=1, min_p=0.1, max_new_tokens=5)
    assert follow_options("llamacpp", "peer", "m", config).items() >= {"temperature": 1, "min_p": 0.1}.items()
    with pytest.raises(OptionError, match="peer has no min_p here, so mode 'm' cannot be compared"):
        follow_options("ortgenai", "peer", "m", config)
    with pytest.raises(OptionError, match="peer has no temperature here"):
        follow_options("genai", "peer", "m", config, but="temperature")
    with pytest.raises(OptionError, match="peer has no sampling='typical' here"):
        follow_options("genai", "peer", "m", config.replace(sampling="typical"))
    tools = [{"type": "function", "function": {"name": "f"}}]
    texts = {"adapter": "a", "json_schema": True, "regex": "a", "grammar": "start: /a/", "tools": tools}
    for name, value in texts.items():  # what makes another text
        with pytest.raises(OptionError, match=f"peer has no {name} here"):
            follow_options("genai", "peer", "m", GenerationConfig().replace(**{name: value}))


# --- workers -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_decodes_what_its_engine_would(worker: BenchWorker, toy_engine: Engine) -> None:
    prompt = toy_engine.tokenizer.encode_prompt("abc abc")
    worker.start()
    assert worker.pid != os.getpid()
    assert set(worker.descriptions) == {"plain", "draft:3"}
    plain, drafted = (worker.run(name, prompt, GENERATION) for name in ("plain", "draft:3"))
    assert plain.token_ids == drafted.token_ids == toy_engine.generate(prompt, GENERATION).token_ids
    assert drafted.stats["num_drafts"] > 0
    assert 0 < drafted.first_token_seconds < drafted.total_seconds


@pytest.mark.slow
def test_a_device_that_is_replaced_shows_in_the_parent(setup: Setup, tmp_path: Path) -> None:
    broken = {"NPUW_DEVICES": "CPU", "NPUW_NO_SUCH": "1"}
    setup = replace(setup, config=setup.config.replace(draft_device="NPU", draft_properties=broken))
    made = BenchWorker(["plain"], setup, tmp_path / "log")
    try:
        with pytest.warns(DeviceWarning, match="NPUW_NO_SUCH.* CPU is used instead"):
            made.start()
    finally:
        made.close()


def test_references_reach_what_reads_them(toy_engine: Engine) -> None:
    """A mode may ignore references that other modes of the comparison read; a request may not."""
    config = GenerationConfig(max_new_tokens=24, ignore_eos=True)
    prompt = toy_engine.tokenizer.encode_prompt("hello")
    plain = toy_engine.generate(prompt, config, drafter=None)
    config = config.replace(references=["hello" + plain.text])
    names = ["plain", "draft:3", "draft", "ngram:3", "auto:3", "shuffled:3", "suffix:3"]
    runs = {mode.name: mode.run(prompt, config) for mode in make_modes(names, toy_engine)}
    assert all(run.token_ids == plain.token_ids for run in runs.values())
    assert runs["suffix:3"].stats["num_accepted_tokens"] > runs["ngram:3"].stats["num_accepted_tokens"]


@pytest.mark.slow
def test_a_run_that_fails_leaves_the_worker_alive(worker: BenchWorker) -> None:
    worker.start()
    pid = worker.pid
    with pytest.raises(RunFailed, match="exceed the model's context") as caught:
        worker.run("plain", [1] * 3000, GENERATION)
    assert not caught.value.died
    assert worker.run("plain", [1, 2], GENERATION).token_ids
    assert worker.pid == pid


@pytest.mark.slow
def test_a_worker_that_dies_says_so_and_starts_again(worker: BenchWorker) -> None:
    worker.start()
    os.kill(worker.pid or 0, signal.SIGTERM)
    with pytest.raises(RunFailed, match=r"the process died \((signal SIGTERM|exit code \d+)\)") as caught:
        worker.run("plain", [1, 2], GENERATION)
    assert caught.value.died
    assert worker.pid is None
    assert worker.run("plain", [1, 2], GENERATION).token_ids


def test_what_cannot_be_meant_is_an_error_of_usage(setup: Setup, tmp_path: Path) -> None:
    made = BenchWorker(["plain", "warp:3"], setup, tmp_path / "log")
    with pytest.raises(OptionError, match="There is no mode 'warp:3'"):
        made.start()
    assert made.pid is None


@pytest.mark.slow
def test_a_mode_that_dies_is_reported_and_the_others_go_on(setup: Setup, tmp_path: Path) -> None:
    tasks = encode_prompts(PROMPTS, ToyTokenizer())
    with start_workers(["plain", "draft:3"], setup, tmp_path, lambda *_: None) as modes:
        worker: BenchWorker = modes[0].worker
        os.kill(worker.pid or 0, signal.SIGTERM)
        records = measure(modes, tasks, GENERATION)
    (died,) = (record for record in records if record.error)
    assert (died.number, died.mode) == (0, "plain")
    assert "the process died" in (died.error or "")
    # The worker started again for the other mode. The mode that killed it is not tried again.
    assert [record.mode for record in records if record.run] == ["draft:3"] * 3


@pytest.mark.slow
def test_a_mode_that_cannot_be_loaded_is_a_failure(setup: Setup, tmp_path: Path) -> None:
    broken = replace(setup, bundle=replace(setup.bundle, folder=tmp_path / "gone"))
    failures: list[tuple[str, str]] = []
    with start_workers(["plain"], broken, tmp_path, lambda *failure: failures.append(failure)) as modes:
        assert modes == []
    assert failures[0][0] == "plain"
    with pytest.raises(OutriderError, match="No mode can be loaded; plain: "):
        benchmark.run(broken, PROMPTS, ["plain"])


# --- on disk -----------------------------------------------------------------------------------------------------


def test_a_folder_goes_on_where_it_was_left(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "run", {"modes": ["plain"], "repeats": 2})
    records = [RunRecord(0, "plain", 0, Run([1, 2], 0.1, 0.2, {"x": [1]})), RunRecord(0, "plain", 1, None, "it broke")]
    for record in records:
        first.append(record)
    first.choose(max_new_tokens=20)
    with (tmp_path / "run" / "runs.jsonl").open("a") as file:
        file.write('{"number": 0, "mode": "pl')  # as after a power failure
    again = RunFolder(tmp_path / "run", {"modes": ["plain"], "repeats": 2})
    assert again.records == records
    assert again.chosen == {"max_new_tokens": 20}
    again.append(records[0])
    assert RunFolder(tmp_path / "run", {"modes": ["plain"], "repeats": 2}).records == [*records, records[0]]
    with pytest.raises(OptionError, match="holds another measurement, with repeats=2 instead of 3"):
        RunFolder(tmp_path / "run", {"modes": ["plain"], "repeats": 3})


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("important")
    with pytest.raises(OptionError, match="is no measurement, and not empty"):
        RunFolder(tmp_path, {})
    (tmp_path / "mine.txt").rename(tmp_path / "setting.json")
    with pytest.raises(OptionError, match="cannot be used"):
        RunFolder(tmp_path, {})
    with pytest.raises(OptionError, match="cannot be used"):
        RunFolder(tmp_path / "setting.json", {})


def test_what_is_there_is_not_run_again_and_what_failed_is() -> None:
    clock = [0.0]
    tasks = [Task(prompt, [1]) for prompt in PROMPTS]
    done = [RunRecord(0, "m", 0, Run([9], 0.0, 1.0)), RunRecord(1, "m", 0, None, "it broke")]
    new: list[RunRecord] = []
    records = measure([Counted("m", clock, 1.0)], tasks, GENERATION, done=done, record=new.append)
    assert sorted(record.number for record in new) == [1, 2]
    results = benchmark.condense(records, tasks, [{"name": "m"}], "m")
    assert results["failures"] == []
    assert {run["id"]: run["token_ids"] for run in results["runs"]} == {"one": [9], "two": [1], "three": [1]}


@pytest.mark.slow
@pytest.mark.needs("POSIX")
def test_what_was_interrupted_goes_on(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a kill, which may cut off a line, and after Ctrl-C, which says how to go on."""
    folder = tmp_path / "out"
    runs = folder / "runs.jsonl"
    arguments = ["bench", str(tiny), "--modes", "plain,genai", "--max-new-tokens", "600", "--out", str(folder)]

    def start(num_runs: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", "from outrider.cli import main; main()", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "500"},
        )  # fmt: skip
        while not runs.exists() or runs.read_bytes().count(b"\n") < num_runs:
            assert process.poll() is None
            time.sleep(0.01)
        return process

    process = start(2)
    process.kill()
    process.communicate()
    whole = runs.read_bytes().rpartition(b"\n")[0]
    assert not (folder / "results.json").exists()
    process = start(whole.count(b"\n") + 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert f"The runs so far are in {folder}; the same command continues from there.\n" in errors
    assert errors.endswith("outrider: Cancelled.\n")
    before = runs.read_bytes()
    assert before.startswith(whole)
    assert before.count(b"\n") < 12
    assert run([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 12
    assert runs.read_bytes().startswith(before.rpartition(b"\n")[0])
    lines = [json.loads(line) for line in runs.read_bytes().splitlines()]
    assert len({(line["number"], line["mode"], line["repeat"]) for line in lines}) == len(lines) == 12
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert run([*arguments[:-2], "--quick", "--out", str(folder)]) == 2
    assert "holds another measurement, with " in capsys.readouterr().err


# --- the report --------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Text and tags of a page; asserts that every element is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.references: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Closed at once."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_report_says_what_the_results_say(setup: Setup, tmp_path: Path) -> None:
    results = benchmark.run(setup, PROMPTS, ["plain", "draft:3", "ngram:2"], repeats=2, folder=tmp_path)
    results["failures"].append({"mode": "ngram:2", "id": "two", "error": "<b>it & broke</b>"})
    written = benchmark.save(results, tmp_path)
    assert [path.name for path in written] == ["results.json", "results.md", "report.html"]
    read = json.loads(written[0].read_text(encoding="utf-8"))
    page = Page(report.html(read))
    text, markdown = " ".join(page.words), report.markdown(read)
    assert page.references == []  # nothing from elsewhere
    assert "http" not in text
    assert page.words.count("ngram:2, prompt two: <b>it & broke</b>") == 1
    for row in read["summary"]:
        assert f"{row['speed_up']:.2f}×" in text
        assert f"{row['speed_up']:.2f}×" in markdown
        if row["mode"] != "plain":
            bar = f"| {row['mode']} | {row['category']} | {row['speed_up']:.2f}× |"
            assert any(line.startswith(bar) for line in markdown.splitlines())
    for mode in read["modes"]:
        assert mode["description"] in text
        assert mode["description"] in markdown
    for name, value in read["setting"].items():
        assert name in text
        assert str(value) in text or isinstance(value, list | dict)
    processor = find_processor().description
    assert {name: read["setting"][name] for name in processor} == processor
    assert f"Processor: {processor['processor']}; {processor['instructions']}." in page.words
    slower = {row["mode"] for row in read["summary"] if row["speed_up"] < 1}
    for mode in ("draft:3", "ngram:2"):
        assert any(word.startswith(f"{mode}: ") for word in page.words) is (mode in slower)
    assert len(read["runs"]) == 3 * 3 * 2
    assert "3/3" in page.words
    share = read["profile"]["draft:3"]["accepted_by_position"][0]
    at = page.words.index("Accepted by position, of all drafts")
    row = [word for word in page.words[page.words.index("draft:3", at) :] if word.strip()]
    assert row[1] == f"{share:.0%}"


def test_a_report_of_little_is_a_report() -> None:
    tasks, records = made_up()
    modes = [{"name": name, "runtime": "peer", "description": ""} for name in ("slow", "fast")]
    results = benchmark.condense(records, tasks, modes, "slow") | {"setting": {}, "cut": "To end in time: x."}
    page = Page(report.html(results))
    assert "To end in time: x." in page.words
    assert "Milliseconds of decoding per token" not in page.words  # no runs have these figures
    assert "fast: y 0.50×." in page.words
    alone = benchmark.condense(records[:2], tasks, modes[:1], "slow") | {"setting": {}, "cut": None}
    assert "No mode, in any category." in Page(report.html(alone)).words
