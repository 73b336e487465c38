"""A first start answers by the table, and measures while it is idle: texts, verdicts, and what is not lost."""

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

import outrider
from outrider.bundle import Bundle
from outrider.config import DeviceConfig
from outrider.decoding import measuring
from outrider.decoding.measuring import CheckExactness, Measuring
from outrider.engine import joining
from outrider.errors import ExactnessWarning
from outrider.models.cost import measure
from outrider.models.cost.stored import cost_of
from outrider.models.cost.table import ONE_LOAD
from outrider.models.tuning import first, loading
from outrider.models.tuning.loading import LoadedModel, compile_checked
from outrider.models.tuning.machines import read_machines
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.trials import choose
from outrider.system import saved
from outrider.testing import FakeBackend
from outrider.types import Rounding, RowRule
from toys import load_toy, wait_until

PROMPT = "the cat sat on the mat"
Load = Callable[..., outrider.Engine]
CALLS = {0: ONE_LOAD}  # that show what is measured: a toy's are too short to agree


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder, and nobody who waits before he measures."""
    monkeypatch.setattr(saved, "FOLDER", tmp_path)
    monkeypatch.setattr(joining, "_HEAD_START_SECONDS", 0.0)
    monkeypatch.setattr(measure, "_agreeing", lambda _, near, __: (CALLS[0],) * len(near))
    monkeypatch.setattr(first, "_is_known", lambda _, machine: bool(machine.rows))  # whatever the toy's weights are


@pytest.fixture
def load(toy_bundle: Bundle) -> Iterator[Load]:
    """Loads the toy as a large model is loaded."""
    engines: list[outrider.Engine] = []

    def make(measure: str = "idle") -> outrider.Engine:
        engines.append(load_toy(toy_bundle, cache_size=0.05, measure=measure))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def load_exact(load: Load, toy_bundle: Bundle) -> Load:
    """The same, where the table's rule holds for the toy's weights."""
    if toy_bundle.manifest.main.format == "onnx":
        pytest.skip("the rule in ONNX is that of 4-bit weights, and the toy's rows in fp32 follow another one")
    return load


def answer(engine: outrider.Engine, **options: Any) -> outrider.Result:
    return engine.generate(PROMPT, max_new_tokens=24, ignore_eos=True, **options)


def go_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines measure at once when they are idle."""
    monkeypatch.setattr(Measuring, "patience", 0.0)


def is_exact(engine: outrider.Engine) -> bool:
    return engine.loaded["main"].backend.exactness.holds


def test_the_first_answer_comes_before_anything_is_measured(load_exact: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    load = load_exact
    with monkeypatch.context() as nothing:
        for module, name in ((loading, "choose"), (measuring, "check_exactness")):
            nothing.setattr(module, name, lambda *_: pytest.fail("nothing is measured"))
        engine = load()
        one = answer(engine)
        plain = answer(engine, drafter=None)
        drafted = answer(engine, drafter="draft", num_assistant_tokens=3)
    assert one.token_ids == plain.token_ids == drafted.token_ids
    assert drafted.stats.num_draft_tokens
    assert not one.exact
    assert "not checked yet" in engine.setting["main_device"]
    engine.close()
    go_idle(monkeypatch)
    second = load()
    wait_until(lambda: is_exact(second))
    assert "bit-exact" in second.setting["main_device"]
    assert answer(second).exact
    assert answer(second).token_ids == one.token_ids
    second.close()
    monkeypatch.setattr(measuring, "check_exactness", lambda *_: pytest.fail("it is known"))
    third = load()
    assert answer(third).token_ids == one.token_ids
    assert answer(third).exact


def test_where_rows_turn_out_not_to_be_exact_drafts_stop_and_the_next_start_measures(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drill: no text is ever called exact that is not measured to be."""
    engine = load()
    plain, before = answer(engine, drafter=None), answer(engine, drafter="draft", num_assistant_tokens=3)
    assert not before.exact
    engine.close()
    go_idle(monkeypatch)
    said = list[Any]()
    with monkeypatch.context() as wrong:
        wrong.setattr(measuring, "check_exactness", lambda _, made: made.update({"wrong drafts": 0.5}))
        wrong.setattr(warnings, "showwarning", lambda *given, **_: said.append(given[:2]))
        engine = load()
        wait_until(lambda: said)
    assert [(kind, "differ by up to 0.5" in str(text)) for text, kind in said] == [(ExactnessWarning, True)]
    after = answer(engine, drafter="draft", num_assistant_tokens=3)
    assert after.token_ids == plain.token_ids
    assert not after.stats.num_draft_tokens
    assert not after.exact
    assert "not bit-exact" in engine.setting["main_device"]
    engine.close()
    tried = list[ModelSpec]()

    def chosen(spec: ModelSpec, settings: Any) -> Any:
        tried.append(spec)
        return choose(spec, settings)

    monkeypatch.setattr(loading, "choose", chosen)
    again = load()
    assert [spec.role for spec in tried] == ["main"]
    assert is_exact(again)
    assert answer(again, drafter="draft", num_assistant_tokens=3).stats.num_draft_tokens


def test_a_machine_that_nobody_knows_drafts_once_it_is_checked(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "this_machine", lambda: read_machines()[-1])
    engine = load()
    rule = engine.loaded["main"].backend.capabilities.rows
    assert (rule.sequence, rule.logits) == (Rounding(8, 8), Rounding(8, 8))
    drafted = {"drafter": "draft", "num_assistant_tokens": 3}
    assert not answer(engine, **drafted).stats.num_draft_tokens
    engine.close()
    go_idle(monkeypatch)
    engine = load()
    wait_until(lambda: engine._registry.may_draft)
    assert answer(engine, **drafted).stats.num_draft_tokens
    assert answer(engine, **drafted).exact


def test_a_draft_model_joins_an_answer_that_runs(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = threading.Event()
    monkeypatch.setattr(joining, "compile_checked", lambda spec: may_go.wait() and compile_checked(spec))
    engine = load()
    assert "draft" in engine.drafters
    plain = answer(engine, drafter=None)
    chunks = engine.stream(PROMPT, max_new_tokens=24, ignore_eos=True)
    next(chunks)
    may_go.set()
    model = cast("Any", engine.draft_models["draft"])  # waits for it
    assert "draft" in engine.loaded
    *_, last = chunks
    assert last.result is not None
    assert last.result.token_ids == plain.token_ids
    assert not model._states
    assert answer(engine, drafter="draft", num_assistant_tokens=3).stats.num_draft_tokens


def test_a_draft_model_that_cannot_be_loaded_is_left_out(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = threading.Event()

    def fail(_: ModelSpec) -> LoadedModel:
        may_go.wait()
        raise outrider.DeviceError("it is broken")

    monkeypatch.setattr(joining, "compile_checked", fail)
    engine = load()
    with pytest.warns(outrider.DeviceWarning, match="it is broken"):
        found = models_of(engine, may_go)
    assert not found
    assert answer(engine).token_ids
    with pytest.raises(outrider.OptionError, match="left out"):
        answer(engine, drafter="draft")


def models_of(engine: outrider.Engine, may_go: threading.Event) -> dict[str, Any]:
    may_go.set()
    return dict(engine.draft_models)


class Limited:
    """Says that a request comes after so many calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture
def loaded(openvino_bundle: Bundle) -> LoadedModel:
    spec = ModelSpec("main", openvino_bundle, openvino_bundle.manifest.main).on("CPU", DeviceConfig(measure="idle"))
    model = compile_checked(spec)
    model.backend.allocate(4096)
    model.cost = cost_of(spec, model.backend)
    return model


def count_calls(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls, submit = [0], model.backend.submit

    def counted(chunks: Any) -> Any:
        calls[0] += 1
        return submit(chunks)

    monkeypatch.setattr(model.backend, "submit", counted)
    return calls


def test_a_check_gives_way_at_each_call_and_repeats_no_reading(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, calls, verdicts = loaded.backend, count_calls(loaded, monkeypatch), list[bool]()
    CheckExactness(loaded, verdicts.append).go_on(main, lambda: False)
    assert verdicts == [True]
    whole, calls[0] = calls[0], 0
    loaded.choice = replace(loaded.choice, setting=replace(loaded.choice.setting, exactness=main.exactness))
    job, paused = CheckExactness(loaded, verdicts.append), 0
    while job.is_due:
        job.go_on(main, Limited(40))
        paused += job.is_due
    assert paused
    assert calls[0] < whole + 40 * paused
    assert verdicts == [True, True]
    assert loading.choice_of(loaded.spec).setting.exactness.holds


SEPARATE = RowRule(separate=True, call=Rounding(2))


@pytest.mark.parametrize(("name", "rules", "depends", "rule"), [
    ("AMX", (SEPARATE,), False, RowRule(Rounding(2), Rounding(2), Rounding(2), separate=True)),
    ("AVX2 alone", (SEPARATE,), False, RowRule(Rounding(2), Rounding(2), Rounding(2), separate=True, most=80)),
    ("AVX2 alone", (SEPARATE,), True, RowRule(Rounding(8), Rounding(8), Rounding(8), separate=True, most=80)),
    ("AVX2 alone", (), False, RowRule(Rounding(2), logits=Rounding(2), most=80)),
    ("any", (SEPARATE,), False, RowRule(Rounding(8, 8), Rounding(8, 8), Rounding(8, 8), separate=True, most=64)),
    ("any", (), False, RowRule(Rounding(8, 8), Rounding(8, 8), Rounding(8, 8), most=64)),
])  # fmt: skip
def test_the_rule_of_a_machine(name: str, rules: tuple[RowRule, ...], depends: bool, rule: RowRule) -> None:
    machine = next(each for each in read_machines() if each.name == name)
    backend = FakeBackend(16, can_divide=True, separate_rules=rules)
    backend.few_rows_differ = depends
    assert first._rule_of(machine, cast("Any", backend)) == rule
