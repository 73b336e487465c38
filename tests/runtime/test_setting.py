"""The choice of a model's setting, on fakes that differ in speed, exactness and precision."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.bundle import Bundle
from outrider.config import DeviceConfig
from outrider.models.backends import registry
from outrider.models.backends.processor import ProcessorFacts
from outrider.models.cost.measure import CallTimes
from outrider.models.cost.table import CallCost
from outrider.models.tuning import loading, setting, trials
from outrider.models.tuning.loading import choice_of, compile_settled
from outrider.models.tuning.measure.exactness import measure_exactness
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.setting import Choice, Setting
from outrider.models.tuning.trials import search
from outrider.system import saved
from outrider.testing import FakeBackend, ToyTokenizer
from outrider.types import Exactness, Rounding, RowRule
from toys import load_toy

Machine = Callable[..., list[Setting]]  # sets a machine's precisions, and gives the settings compiled from then on
IN_EIGHTS = RowRule(call=Rounding(8, 8), logits=Rounding(8, 8))


@dataclass(frozen=True)
class Kind:
    """A precision as a processor has it. milliseconds: of a call, by the rows that it computes."""

    milliseconds: Callable[[int], float]
    kernels: Callable[[int], int] = lambda _: 0
    attention_kernels: Callable[[int], int] = lambda _: 0
    noise: float = 0.0
    separate_rules: tuple[RowRule, ...] = ()


FAST, SLOW = (lambda rows: 10 + rows / 10), (lambda rows: 20 + rows / 5)
# As bf16 with AMX: only calls of multiples of 8 rows agree. For the second one, eight rows cost no more than one.
EIGHTS = Kind(lambda rows: 4.0 if rows < 8 else 11.0, kernels=lambda rows: 0 if rows % 8 == 0 else rows)
CHEAP_EIGHTS = Kind(lambda rows: 5.0, kernels=EIGHTS.kernels)
BROKEN = Kind(lambda rows: 0.0)
NEVER = Kind(lambda rows: 1.0, kernels=lambda rows: rows)


@pytest.fixture
def part(openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelSpec:
    monkeypatch.setattr(saved, "FOLDER", tmp_path)
    return ModelSpec("main", openvino_bundle, openvino_bundle.manifest.main)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Machine:
    compiled: list[Setting] = []

    def has(
        cores: dict[str, int] | None = None, by_threads: dict[int, float] | None = None, **kinds: Kind
    ) -> list[Setting]:
        """cores: as `count_cores`. by_threads: how many times as long calls take, by threads."""
        by_threads = by_threads or {}

        def compile_it(part: ModelSpec, setting: Setting) -> Any:
            own = setting.options(part.options)
            kind = kinds[own.precision]
            if kind is BROKEN:
                raise outrider.DeviceError("it is broken")
            compiled.append(Setting(own.precision, own.cache_precision, num_threads=own.num_threads))
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

        def measure(times: CallTimes) -> CallCost:
            taken = tuple(seconds(times.backend, count) for count in times.rows)
            return CallCost(times.rows, taken, taken)

        for module in (trials, loading):
            monkeypatch.setattr(module, "compile_model", compile_it)
            monkeypatch.setattr(module, "settings_for", lambda *_: [Setting(name, name) for name in kinds])
        monkeypatch.setattr(trials, "has_rule", lambda *_: False)
        monkeypatch.setattr(CallTimes, "measure", measure)  # else the times would depend on the machine's load
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

    monkeypatch.setattr(trials, "measure_exactness", count)
    return found


def fastest(part: ModelSpec) -> Choice:
    best = search(part)
    assert best is not None
    return best


@pytest.mark.parametrize(("share", "taken"), [(0.95, "f32"), (0.85, "bf16")])
def test_a_small_gain_is_noise(part: ModelSpec, processor: Machine, share: float, taken: str) -> None:
    """Two searches would choose differently, which are two texts."""
    processor(f32=Kind(SLOW), bf16=Kind(lambda rows: share * (20 + rows / 5)))
    assert fastest(part).setting.precision == taken


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
    processor: Machine,
    cores: dict[str, int],
    by_threads: dict[int, float],
    tried: list[int],
    taken: int,
) -> None:
    processor(cores=cores, by_threads=by_threads, f32=Kind(FAST), bf16=Kind(SLOW))
    best = fastest(part)
    assert (best.setting.precision, best.setting.num_threads) == ("f32", taken)
    assert [trial.setting.num_threads for trial in best.trials if trial.setting.precision == "f32"] == tried
    assert best.setting.options(DeviceConfig()).num_threads == taken


def test_a_draft_model_has_one_precision_and_its_own_threads(
    part: ModelSpec, processor: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bits do not matter."""
    allowed = setting.settings_for
    compiled = processor(cores={"cores": 4}, by_threads={2: 0.5}, f32=Kind(SLOW), bf16=Kind(FAST))
    monkeypatch.setattr(trials, "settings_for", allowed)
    monkeypatch.setattr("outrider.models.tuning.model_spec.SMALL", 0)
    found = fastest(replace(part, role="draft")).setting
    assert (found.precision, found.num_threads) == ("f32", 2)
    assert {each.precision for each in compiled} == {"f32"}


def test_the_users_threads_stay(part: ModelSpec, processor: Machine) -> None:
    compiled = processor(cores={"cores": 16}, by_threads={8: 0.1}, f32=Kind(FAST), bf16=Kind(SLOW))
    assert fastest(part.on("CPU", DeviceConfig(num_threads=12))).setting.num_threads == 0
    assert {setting.num_threads for setting in compiled if setting.precision == "bf16"} == {12}


def test_what_padding_costs_counts(part: ModelSpec, processor: Machine) -> None:
    """It pads one row to eight. Without padding it is the faster setting, with padding the slower one."""
    processor(f32=Kind(FAST), bf16=EIGHTS)
    best = fastest(part)
    assert best.setting.precision == "f32"
    assert best.trials[1].setting.exactness.rule == IN_EIGHTS
    assert best.trials[1].is_usable


def test_rows_in_eights_are_taken_where_they_are_cheap(part: ModelSpec, processor: Machine) -> None:
    processor(f32=Kind(FAST), bf16=CHEAP_EIGHTS)
    best = fastest(part).setting
    assert (best.precision, best.exactness.rule, best.exactness.holds) == ("bf16", IN_EIGHTS, True)


def test_what_is_not_exact_or_broken_is_not_taken(part: ModelSpec, processor: Machine, measured_of: list[str]) -> None:
    processor(bf16=NEVER, f32=Kind(SLOW), f16=BROKEN)
    best = fastest(part)
    assert best.setting.precision == "f32"
    assert measured_of == ["bf16", "f32"]
    assert [trial.failure for trial in best.trials] == ["not exact", "", "it is broken"]
    processor(f32=NEVER)
    assert search(part) is None


def test_a_load_takes_the_first_setting_that_is_exact(
    part: ModelSpec, processor: Machine, measured_of: list[str]
) -> None:
    """However fast others are."""
    processor(f32=NEVER, f16=Kind(SLOW), bf16=Kind(FAST))
    assert choice_of(part).setting.precision == "f16"
    assert measured_of == ["f32", "f16"]


def test_the_rule_of_the_table_is_tried_first(
    part: ModelSpec, processor: Machine, measured_of: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, kernels = RowRule(sequence=Rounding(4)), Kind(FAST, kernels=lambda rows: int(rows < 3))
    expected = Exactness(rule=rule, is_expected=True)
    monkeypatch.setattr(trials, "expected_exactness", lambda *_: expected)
    for kind, measured in ((kernels, []), (Kind(FAST, kernels=lambda rows: int(rows < 5)), ["f32"])):
        measured_of.clear()
        processor(f32=kind)
        monkeypatch.setattr(trials, "has_rule", lambda *_: True)
        found, backend = trials.choose(part, [Setting("f32", "f32")])
        assert measured_of == measured
        assert found.setting.exactness.holds
        assert not found.setting.exactness.is_expected
        assert (found.setting.exactness.rule == rule) == (not measured)
        assert backend.capabilities.rows == found.setting.exactness.rule


def test_where_nothing_is_exact_that_is_said(part: ModelSpec, processor: Machine) -> None:
    processor(bf16=NEVER)
    with pytest.warns(outrider.ExactnessWarning, match=r"in bf16.* logits differ by up to .* Leave precision"):
        _, backend = compile_settled(part.on("CPU", DeviceConfig(precision="bf16")))
    assert not backend.capabilities.bit_exact_batching
    processor(f32=NEVER)
    with pytest.warns(
        outrider.ExactnessWarning, match=r"in f32.* Load with drafter='none' .* export the model to ONNX"
    ):
        compile_settled(part.on("CPU", DeviceConfig(num_threads=1)))


def test_rows_are_read_alone_where_that_makes_them_exact(part: ModelSpec, processor: Machine) -> None:
    separate = RowRule(separate=True)
    processor(f32=Kind(FAST, attention_kernels=lambda rows: int(rows == 1), separate_rules=(separate,)))
    found = choice_of(part).setting
    assert found.exactness.rule == RowRule(sequence=Rounding(2), separate=True)


def test_a_draft_model_reads_rows_alone_and_claims_nothing(part: ModelSpec, processor: Machine) -> None:
    processor(f32=Kind(FAST, separate_rules=(RowRule(separate=True, dummy_rows=2),)))
    found = choice_of(replace(part, role="draft", options=DeviceConfig(measure="first"))).setting
    assert found.exactness == Exactness(rule=RowRule(separate=True))


def test_it_is_found_out_once(part: ModelSpec, processor: Machine) -> None:
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
    compile_it = registry.compile_model

    def spy(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compile_it(*arguments, **options)

    for module in (trials, loading):
        monkeypatch.setattr(module, "compile_model", spy)
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
    for module in (trials, loading):
        monkeypatch.setattr(module, "compile_model", lambda *_: pytest.fail("it is compiled again"))
    assert {*engine.choices} == {"main", "draft"}


@pytest.mark.slow
def test_a_load_says_what_it_does(openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(saved, "FOLDER", tmp_path)
    monkeypatch.setattr("outrider.models.tuning.model_spec.SMALL", 0)
    monkeypatch.setattr("outrider.engine.assembly.Tokenizer", lambda *_, **__: ToyTokenizer())
    monkeypatch.setattr("outrider.engine.assembly.check_tokenizer", lambda _: None)
    said: list[str] = []
    outrider.load(openvino_bundle.folder, cache_size=0.01, keep_records=False, measure="first", progress=said.append)
    assert said[0] == f"Loading {openvino_bundle.folder}."
    assert any(each.startswith("The main model is measured on CPU: f32") for each in said)
    with pytest.raises(KeyboardInterrupt):
        outrider.load(openvino_bundle.folder, progress=interrupt)
    said.clear()
    outrider.load(openvino_bundle.folder, cache_size=0.01, keep_records=False)
    assert not said


def interrupt(_: str) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("own", "tried"), [
    ({}, {("f32", "f32")}),
    ({"precision": "bf16"}, {("bf16", "bf16")}),
    ({"precision": "f16", "cache_precision": "u8"}, {("f16", "u8")}),
])  # fmt: skip
def test_another_precision_is_tried_if_it_is_named(
    part: ModelSpec, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], tried: set[tuple[str, str]]
) -> None:
    """Whatever the processor has: another precision is another text."""
    monkeypatch.setattr("outrider.models.tuning.model_spec.SMALL", 0)
    found = setting.settings_for(part.on("CPU", DeviceConfig(**own)))
    assert {(each.precision, each.cache_precision) for each in found} == tried
