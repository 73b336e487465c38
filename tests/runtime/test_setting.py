"""The choice of a model's setting, on fakes that differ in speed, exactness and precision."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.bundle import Bundle
from outrider.config import DeviceConfig
from outrider.models.backends.columns import COLUMNS
from outrider.models.backends.processor import ProcessorFacts
from outrider.models.tuning import measured, setting, trials
from outrider.models.tuning.loading import choice_of, compile_settled
from outrider.models.tuning.measure.exactness import measure_exactness
from outrider.models.tuning.measured import Measured
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.setting import Setting
from outrider.system import saved
from outrider.testing import FakeBackend, ToyTokenizer
from outrider.types import Exactness, Rounding, RowRule
from toys import load_toy

IN_EIGHTS = RowRule(call=Rounding(8, 8), logits=Rounding(8, 8))


@dataclass(frozen=True)
class Kind:
    """A precision as a processor has it. milliseconds: of a call, by the rows that it computes."""

    milliseconds: Callable[[int], float]
    kernels: Callable[[int], int] = lambda _: 0
    attention_kernels: Callable[[int], int] = lambda _: 0
    noise: float = 0.0
    separate_rules: tuple[RowRule, ...] = ()
    wide: "Kind | None" = None  # with columns appended to products


FAST, SLOW = (lambda rows: 10 + rows / 10), (lambda rows: 20 + rows / 5)
# As bf16 with AMX: only calls of multiples of 8 rows agree. For the second one, eight rows cost no more than one.
EIGHTS = Kind(lambda rows: 4.0 if rows < 8 else 11.0, kernels=lambda rows: 0 if rows % 8 == 0 else rows)
CHEAP_EIGHTS = Kind(lambda rows: 5.0, kernels=EIGHTS.kernels)
NEVER = Kind(lambda rows: 1.0, kernels=lambda rows: rows if rows < 45 else 0)  # the text of KL is read in 48


@pytest.fixture
def part(openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelSpec:
    monkeypatch.setattr(saved, "FOLDER", tmp_path)
    return ModelSpec("main", openvino_bundle, openvino_bundle.manifest.main)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Setting]]:
    """Returns a function that sets the machine's precisions, and returns the settings compiled from then on."""
    compiled: list[Setting] = []

    def has(
        cores: dict[str, int] | None = None, by_threads: dict[int, float] | None = None, **kinds: Kind
    ) -> list[Setting]:
        """cores: as `count_cores`. by_threads: how many times as long calls take, by threads."""
        by_threads = by_threads or {}

        def compile_it(part: ModelSpec, setting: Setting, graph: object = None) -> Any:
            own, columns = setting.options(part.options), setting.columns
            kind = (columns and kinds[own.precision].wide) or kinds[own.precision]
            compiled.append(Setting(own.precision, own.cache_precision, num_threads=own.num_threads, columns=columns))
            made: Any = FakeBackend(
                24,
                noise=kind.noise,
                kernels=kind.kernels,
                attention_kernels=kind.attention_kernels,
                separate_rules=kind.separate_rules,
            )
            made.allocate, made.device, made.kind = (lambda _: None), part.device, kind
            made.precision, made.cache_precision = own.precision, own.cache_precision
            made.num_threads = own.num_threads
            return made

        def seconds(backend: Any, count: int) -> float:
            taken: float = backend.kind.milliseconds(backend.capabilities.rows.num_rows([count])) / 1000
            return taken * by_threads.get(backend.num_threads, 1.0)

        def time_calls(backend: Any, calls: list[tuple[int, int]], patience: float) -> dict[tuple[int, int], float]:
            return {call: seconds(backend, call[0]) for call in calls}

        monkeypatch.setattr(ModelSpec, "compile", compile_it)
        monkeypatch.setattr(measured, "time_calls", time_calls)  # else the times would depend on the machine's load
        monkeypatch.setattr(trials, "settings_for", lambda *_: [Setting(name, name) for name in kinds])
        monkeypatch.setattr(setting, "this_processor", lambda: ProcessorFacts("one", cores=cores or {"threads": 2}))
        return compiled

    return has


@pytest.fixture
def measured_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The precisions whose exactness is measured from now on."""
    measure, found = measure_exactness, list[str]()

    def count(backend: Any) -> Exactness:
        found.append(backend.precision)
        return measure(backend)

    monkeypatch.setattr(measured, "measure_exactness", count)
    return found


@pytest.mark.parametrize(("share", "taken"), [(0.85, "f32"), (0.75, "bf16")])
def test_a_small_gain_is_noise(
    part: ModelSpec, processor: Callable[..., list[Setting]], share: float, taken: str
) -> None:
    """Two loads would choose differently, which are two texts."""
    processor(f32=Kind(SLOW), bf16=Kind(lambda rows: share * (20 + rows / 5)))
    assert choice_of(part).setting.precision == taken


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("cores", "by_threads", "tried", "taken"), [
    ({"cores": 16}, {8: 0.8, 4: 0.7, 2: 0.9}, [0, 8, 4, 2], 4),
    ({"cores": 16}, {8: 0.8, 4: 0.9, 2: 0.1}, [0, 8, 4], 8),  # stops when fewer threads are slower
    ({"cores": 16}, {8: 0.97, 4: 0.1}, [0, 8], 0),  # 0.97 is within the noise
    ({"performance": 6, "efficiency": 8}, {6: 0.7, 3: 1.1}, [0, 6, 3], 6),
    ({"cores": 3}, {1: 0.1}, [0], 0),
    ({"threads": 8}, {4: 0.1}, [0], 0),  # where nothing is known of cores
])  # fmt: skip
def test_fewer_threads_are_taken_where_they_are_faster(
    part: ModelSpec,
    processor: Callable[..., list[Setting]],
    cores: dict[str, int],
    by_threads: dict[int, float],
    tried: list[int],
    taken: int,
) -> None:
    processor(cores=cores, by_threads=by_threads, f32=Kind(FAST), bf16=Kind(SLOW))
    choice = choice_of(part)
    assert (choice.setting.precision, choice.setting.num_threads) == ("f32", taken)
    assert {trial.setting.num_threads for trial in choice.trials if trial.setting.precision == "f32"} == {*tried}
    assert choice.setting.options(DeviceConfig()).num_threads == taken


def test_a_draft_model_has_one_precision_and_its_own_threads(
    part: ModelSpec, processor: Callable[..., list[Setting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bits do not matter, and the first load is not to wait for what gains little."""
    allowed = setting.settings_for
    compiled = processor(cores={"cores": 4}, by_threads={2: 0.5}, f32=Kind(SLOW), bf16=Kind(FAST))
    monkeypatch.setattr(trials, "settings_for", allowed)
    monkeypatch.setattr("outrider.models.tuning.model_spec.SMALL", 0)
    found = choice_of(replace(part, role="draft", options=DeviceConfig(measure="first"))).setting
    assert (found.precision, found.num_threads) == ("f32", 2)
    assert {each.precision for each in compiled} == {"f32"}


def test_narrower_groups_are_not_tried_where_the_wider_can_be_taken(
    part: ModelSpec, processor: Callable[..., list[Setting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = processor(f32=Kind(FAST), bf16=Kind(SLOW))
    settings = [Setting(name, name, group) for name in ("f32", "bf16") for group in (128, None)]
    monkeypatch.setattr(trials, "settings_for", lambda *_: settings)
    choice = choice_of(part)
    assert [trial.setting.precision for trial in choice.trials] == ["f32", "bf16"]
    assert choice.setting.group_size == 128
    assert len([each for each in compiled if each.precision == "bf16"]) == 1


FEW_OF_FIVE = Kind(lambda rows: 10.0 + rows, kernels=lambda rows: int(rows < 5))  # calls of one row need five


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("wide", "verdict"), [
    pytest.param(Kind(lambda rows: 10.0 + rows), "chosen", id="no padding"),
    pytest.param(Kind(lambda rows: 10.0 + rows, kernels=lambda rows: int(rows < 2)), "chosen", id="two rows"),
    pytest.param(Kind(lambda rows: 12.9 + rows), "exact", id="rounds are as fast as before"),
    pytest.param(Kind(lambda rows: 10.0 + rows * (1 if rows < 50 else 1.1)), "exact", id="prompts are slower"),
    pytest.param(Kind(lambda rows: 5.0, kernels=FEW_OF_FIVE.kernels), "calls need as many rows", id="the same rows"),
    pytest.param(Kind(lambda rows: 5.0, noise=1.0), "too far from f32", id="too far"),
])  # fmt: skip
def test_columns_are_appended_where_calls_need_fewer_rows_and_less_time(
    part: ModelSpec, processor: Callable[..., list[Setting]], monkeypatch: pytest.MonkeyPatch, wide: Kind, verdict: str
) -> None:
    monkeypatch.setattr(ModelSpec, "can_append", lambda *_: True)
    compiled = processor(cores={"cores": 4}, by_threads={2: 0.5}, f32=replace(FEW_OF_FIVE, wide=wide), bf16=Kind(SLOW))
    choice = choice_of(part)
    assert choice.setting.columns == (COLUMNS if verdict == "chosen" else 0)
    assert (choice.setting.exactness.rule.num_rows([1]) < 5) == (verdict == "chosen")
    (trial,) = (each for each in choice.trials if each.setting.columns and not each.setting.num_threads)
    assert verdict in ("chosen", trial.verdict.split(":")[0])
    assert choice.setting.num_threads == 2  # tried with the columns, or without
    assert choice_of(part) == choice  # as it was saved
    compiled.clear()
    compile_settled(part)
    assert [each.columns for each in compiled] == [choice.setting.columns]


@pytest.mark.parametrize(("can_append", "kind"), [
    pytest.param(False, FEW_OF_FIVE, id="no such products"),
    pytest.param(True, Kind(FAST, kernels=lambda rows: int(rows < 2)), id="two rows are enough"),
])  # fmt: skip
def test_columns_are_tried_only_where_calls_are_padded_further(
    part: ModelSpec,
    processor: Callable[..., list[Setting]],
    monkeypatch: pytest.MonkeyPatch,
    can_append: bool,
    kind: Kind,
) -> None:
    monkeypatch.setattr(ModelSpec, "can_append", lambda *_: can_append)
    compiled = processor(f32=kind, bf16=Kind(SLOW))
    assert choice_of(part).setting.columns == 0
    assert not any(each.columns for each in compiled)


@pytest.mark.slow
def test_threads_are_those_of_the_setting_that_can_be_taken(
    part: ModelSpec, processor: Callable[..., list[Setting]]
) -> None:
    compiled = processor(cores={"cores": 4}, by_threads={2: 0.5}, f32=Kind(FAST), bf16=NEVER)
    choice = choice_of(part)
    assert (choice.setting.precision, choice.setting.num_threads) == ("f32", 2)
    assert not [setting for setting in compiled if setting.precision == "bf16" and setting.num_threads]


def test_the_users_threads_stay(part: ModelSpec, processor: Callable[..., list[Setting]]) -> None:
    compiled = processor(cores={"cores": 16}, by_threads={8: 0.1}, f32=Kind(FAST), bf16=Kind(SLOW))
    assert choice_of(part.on("CPU", DeviceConfig(num_threads=12))).setting.num_threads == 0
    assert {setting.num_threads for setting in compiled} == {12}


@pytest.mark.slow
def test_what_padding_costs_counts(part: ModelSpec, processor: Callable[..., list[Setting]]) -> None:
    """It pads one row to eight. Without padding it is the faster setting, with padding the slower one."""
    processor(f32=Kind(FAST), bf16=EIGHTS)
    choice = choice_of(part)
    assert choice.setting.precision == "f32"
    assert [trial.verdict for trial in choice.trials] == ["exact", "exact"]
    assert choice.trials[1].setting.exactness.rule == IN_EIGHTS


def test_rows_in_eights_are_taken_where_they_are_cheap(
    part: ModelSpec, processor: Callable[..., list[Setting]]
) -> None:
    processor(f32=Kind(FAST), bf16=CHEAP_EIGHTS)
    _, backend = compile_settled(part)
    assert backend.precision == "bf16"
    assert backend.capabilities.bit_exact_batching
    assert backend.capabilities.rows == IN_EIGHTS


def test_exactness_is_measured_of_the_setting_that_would_be_taken(
    part: ModelSpec, processor: Callable[..., list[Setting]], measured_of: list[str]
) -> None:
    """It takes longer than the times."""
    processor(f32=Kind(SLOW), f16=Kind(FAST, noise=1.0), bf16=Kind(FAST))
    choice = choice_of(part)
    assert choice.setting.precision == "bf16"
    assert measured_of == ["bf16"]
    assert [trial.verdict.split(":")[0] for trial in choice.trials] == ["slower", "too far from f32", "exact"]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("kernels", "holds"), [(EIGHTS.kernels, True), (NEVER.kernels, False)])
def test_where_all_are_too_far_from_f32_the_nearest_is_taken_and_measured(
    part: ModelSpec,
    processor: Callable[..., list[Setting]],
    monkeypatch: pytest.MonkeyPatch,
    measured_of: list[str],
    kernels: Callable[[int], int],
    holds: bool,
) -> None:
    """Whether drafts can change the text does not depend on how far it is from f32."""
    processor(f32=Kind(FAST), f16=Kind(FAST, noise=1.0), bf16=Kind(SLOW, kernels, noise=0.5))
    settings = [Setting(name, name) for name in ("f16", "bf16")]
    monkeypatch.setattr(trials, "settings_for", lambda *_: settings)
    choice = choice_of(part)
    assert (choice.setting.precision, choice.setting.exactness.holds) == ("bf16", holds)
    assert measured_of == ["bf16"]
    assert all(trial.kl is not None and trial.kl > trials.MAX_KL for trial in choice.trials)


def test_settings_of_the_same_groups_are_compared_with_the_same_padding(
    part: ModelSpec, processor: Callable[..., list[Setting]], measured_of: list[str]
) -> None:
    """Without padding f32 is nearly as fast as bf16 with it. With padding it is not, and is not examined."""
    processor(f32=Kind(lambda rows: 8.0 if rows < 8 else 16.0, EIGHTS.kernels), bf16=EIGHTS)
    choice = choice_of(part)
    assert choice.setting.precision == "bf16"
    assert measured_of == ["bf16"]
    assert [trial.verdict for trial in choice.trials] == ["slower", "exact"]


def test_a_setting_that_seems_faster_is_timed_in_turns_with_the_first(
    part: ModelSpec, processor: Callable[..., list[Setting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine was busy when the first setting was timed."""
    processor(f32=Kind(FAST), bf16=Kind(FAST))
    time_calls: Any = vars(measured)["time_calls"]  # of the processor above
    seen = list[str]()

    def slow_at_first(backend: Any, calls: list[Any], patience: float) -> dict[Any, float]:
        seen.append(backend.precision)
        busy = backend.precision == "f32" and "bf16" not in seen
        return {call: taken * (2 if busy else 1) for call, taken in time_calls(backend, calls, patience).items()}

    monkeypatch.setattr(measured, "time_calls", slow_at_first)
    search = trials._Search(part, None, [Setting(name, name) for name in ("f32", "bf16")])
    first, other = search._candidates
    for each in (first, other):
        search._time_first(each, None, "")
    before = first.trial.score
    first.measured = Measured(part, first.setting)  # slices are kept
    first.measured.seconds(trials._MAIN_CALLS)
    assert other.trial.score < 0.9 * before
    search._compare(other, first)
    assert other.trial.score == first.trial.score == pytest.approx(before / 2)
    count = len(seen)
    search._compare(other, first)
    assert len(seen) == count


def test_the_fastest_is_left_out_where_it_is_not_exact(
    part: ModelSpec, processor: Callable[..., list[Setting]]
) -> None:
    processor(f32=Kind(SLOW), bf16=NEVER)
    choice = choice_of(part)
    assert choice.setting.precision == "f32"
    assert [trial.verdict for trial in choice.trials] == ["exact", "not exact"]


def test_where_nothing_is_exact_that_is_said(part: ModelSpec, processor: Callable[..., list[Setting]]) -> None:
    processor(bf16=NEVER)
    with pytest.warns(outrider.ExactnessWarning, match=r"in bf16.* logits differ by up to .* Leave precision"):
        _, backend = compile_settled(part.on("CPU", DeviceConfig(precision="bf16")))
    assert not backend.capabilities.bit_exact_batching
    processor(f32=NEVER)
    with pytest.warns(
        outrider.ExactnessWarning, match=r"in f32.* Load with drafter='none' .* export the model to ONNX"
    ):
        compile_settled(part.on("CPU", DeviceConfig(num_threads=1)))


def test_rows_are_read_alone_where_that_makes_them_exact(
    part: ModelSpec, processor: Callable[..., list[Setting]]
) -> None:
    separate = RowRule(separate=True)
    processor(f32=Kind(FAST, attention_kernels=lambda rows: int(rows == 1), separate_rules=(separate,)))
    found = choice_of(part).setting
    assert found.exactness.rule == RowRule(sequence=Rounding(2), separate=True)


@pytest.mark.parametrize(("milliseconds", "least"), [
    pytest.param(FAST, 2, id="two rows take the time of one"),
    pytest.param(lambda rows: 10 + rows, 1, id="they do not"),
])  # fmt: skip
def test_a_draft_model_reads_rows_alone_and_claims_nothing(
    part: ModelSpec,
    processor: Callable[..., list[Setting]],
    monkeypatch: pytest.MonkeyPatch,
    milliseconds: Callable[[int], float],
    least: int,
) -> None:
    """It reads now one token, now two, and a change of rows takes time."""
    monkeypatch.setattr("outrider.models.tuning.model_spec.SMALL", 0)
    processor(f32=Kind(milliseconds, separate_rules=(RowRule(separate=True, dummy_rows=2),)))
    found = choice_of(replace(part, role="draft", options=DeviceConfig(measure="first"))).setting
    assert found.exactness == Exactness(rule=RowRule(separate=True, call=Rounding(least)))


def test_it_is_found_out_once(part: ModelSpec, processor: Callable[..., list[Setting]]) -> None:
    compiled = processor(f32=Kind(SLOW), bf16=Kind(FAST, noise=1.0))
    first = choice_of(part)
    count = len(compiled)
    assert choice_of(part) == first
    assert len(compiled) == count
    choice_of(part.on("CPU", DeviceConfig(num_threads=1)))
    assert len(compiled) > count


@pytest.mark.parametrize(
    "damage", [{"precision": "f33"}, {"group_size": -5}, {"cache_precision": ""}, {"columns": 1 << 20}]
)
def test_a_setting_that_cannot_be_is_no_setting(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"precision is one of|a group has|a product is widened"):
        Setting(**({"precision": "f32", "cache_precision": "f32"} | damage))


def test_results_say_what_was_measured(openvino_bundle: Bundle) -> None:
    engine = load_toy(openvino_bundle, cache_size=0.01)
    assert ", bit-exact" in engine.setting["main_device"]
    assert engine.generate("hello", max_new_tokens=4).exact
    assert engine.generate("hello", max_new_tokens=4, temperature=1.0, seed=1).exact
    assert not engine.generate("hello", max_new_tokens=4, temperature=1.0, sampling="rejection").exact
    main: Any = engine.main
    main.use(Exactness())
    assert not engine.generate("hello", max_new_tokens=4).exact
    main.allocate(4096)
    main.use(measure_exactness(main))


def test_models_whose_settings_are_known_are_compiled_at_once(
    openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not at the first load, where one would disturb what is measured of the other."""
    monkeypatch.setattr(saved, "FOLDER", tmp_path)
    threads: list[str] = []
    compile_it = ModelSpec.compile

    def spy(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compile_it(*arguments, **options)

    monkeypatch.setattr(ModelSpec, "compile", spy)
    said = []
    for _ in range(2):
        threads.clear()
        engine = load_toy(openvino_bundle, cache_size=0.01)
        said.append((len({*threads}), engine.generate("hello", max_new_tokens=8).token_ids, engine.setting))
    assert [each[0] for each in said] == [1, 2]
    assert said[0][1:] == said[1][1:]


def test_what_was_chosen_is_not_chosen_again_where_nothing_is_saved(
    openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved.SavedValue, "write", lambda *_: None)
    monkeypatch.setattr(saved.SavedValue, "read", lambda *_: None)
    engine = load_toy(openvino_bundle, cache_size=0.01)
    monkeypatch.setattr(ModelSpec, "compile", lambda *_: pytest.fail("it is compiled again"))
    assert {*engine.choices} == {"main", "draft"}


@pytest.mark.slow
def test_a_load_says_what_it_does(openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(saved, "FOLDER", tmp_path)
    monkeypatch.setattr("outrider.models.tuning.model_spec.SMALL", 0)
    monkeypatch.setattr(setting, "may_divide_by_zero", lambda *_: False)  # tests may have one processor
    monkeypatch.setattr("outrider.engine.assembly.Tokenizer", lambda *_, **__: ToyTokenizer())
    monkeypatch.setattr("outrider.engine.assembly.check_tokenizer", lambda _: None)
    said: list[str] = []
    outrider.load(openvino_bundle.folder, cache_size=0.01, keep_records=False, measure="first", progress=said.append)
    assert said[0] == f"Loading {openvino_bundle.folder}."
    assert any(re.search(r"The main model is measured on CPU(, setting 1 of \d|: f32)", each) for each in said)
    with pytest.raises(KeyboardInterrupt):
        outrider.load(openvino_bundle.folder, progress=interrupt)
    said.clear()
    outrider.load(openvino_bundle.folder, cache_size=0.01, keep_records=False)
    assert not said


def interrupt(_: str) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("instructions", "level", "tried"), [
    (("avx2", "avx512_fp16"), "", {"f32", "bf16"}),  # which widens f16
    (("avx2", "amx_fp16"), "", {"f32", "bf16", "f16"}),
    (("asimd", "asimdhp"), "", {"f32", "bf16", "f16"}),
    (("avx2", "amx_fp16"), "AVX512_CORE_BF16", {"f32", "bf16"}),
    (("avx2", "amx_fp16"), "avx2_vnni", {"f32"}),
])  # fmt: skip
def test_precisions_without_kernels_are_not_tried(
    part: ModelSpec, monkeypatch: pytest.MonkeyPatch, instructions: tuple[str, ...], level: str, tried: set[str]
) -> None:
    class Core:
        def get_property(self, *_: str) -> list[str]:
            return ["FP32", "BF16", "FP16"]

    monkeypatch.setattr(setting, "new_core", Core)
    monkeypatch.setattr("outrider.models.tuning.model_spec.SMALL", 0)
    monkeypatch.setattr(setting, "this_processor", lambda: ProcessorFacts("one", instructions))
    monkeypatch.setattr(setting, "may_divide_by_zero", lambda *_: False)  # tests may have one processor
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", level)
    assert {each.precision for each in setting.settings_for(part)} == tried
