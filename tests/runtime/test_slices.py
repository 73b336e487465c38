"""Slices of a model: they are what the model's layers are, and what is measured on them holds for the whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from numpy.typing import NDArray
from openvino import opset13 as ops

from calls import rows_of_call
from layered import make_layered
from outrider.config import DeviceConfig
from outrider.models.backends.paged_graph import read_decoder
from outrider.models.backends.slices import Layers, Slices, _form, choose_layers, find_slices, keep_layers
from outrider.models.backends.taps import after_layers, hidden_states_of
from outrider.models.cost.stored import cost_of
from outrider.models.cost.table import CallCost
from outrider.models.tuning import measured, model_spec, trials
from outrider.models.tuning.loading import choice_of, compile_settled
from outrider.models.tuning.measure import measure_exactness
from outrider.models.tuning.measured import allocate_for_trials, compile_for_trials
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.setting import Setting
from outrider.system import saved
from outrider.types import Chunk, CompiledModel

pytest.importorskip("torch", reason="the model is made with the export half's packages")

NUM_LAYERS = 8
OPTIONS = DeviceConfig(precision="f32", measure="first")


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A random model of eight layers."""
    bundle = make_layered(tmp_path_factory.mktemp("layered"), num_layers=NUM_LAYERS)
    return ModelSpec("main", bundle, bundle.manifest.main)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A random Qwen3.5 of eight layers: six gated delta nets, and two with attention."""
    from outrider_export import export_bundle
    from qwen_module import write_qwen

    folder = tmp_path_factory.mktemp("hybrid")
    write_qwen(folder / "checkpoint", NUM_LAYERS)
    bundle = export_bundle(folder / "checkpoint", output=folder / "bundle", weights="int8")
    return ModelSpec("main", bundle, bundle.manifest.main)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All models count as large enough for slices."""
    monkeypatch.setattr(model_spec, "SMALL", 0)
    monkeypatch.setattr(saved, "FOLDER", tmp_path)


@pytest.fixture
def sliced(part: ModelSpec, large: None) -> ModelSpec:
    """The random model, which counts as large enough."""
    return part


def slices_of(part: ModelSpec) -> Slices:
    found = find_slices(ov.Core(), part.path, part.model.geometry.num_layers)
    assert found is not None
    return found


def logits_of(backend: CompiledModel) -> NDArray[np.float32]:
    """The logits of some tokens, float32 [n, vocab_size]."""
    backend.allocate(256)
    slot = backend.open(64)
    assert slot is not None
    rows = rows_of_call(backend, Chunk(slot, [*range(5, 45)], num_rows=40))
    slot.close()
    return rows


def test_a_slice_has_the_bits_of_a_model_of_its_layers(part: ModelSpec, tmp_path: Path) -> None:
    model = ov.Core().read_model(part.path)
    found = choose_layers(model, NUM_LAYERS)
    assert found is not None
    assert len(found.large) < NUM_LAYERS
    small_bundle = make_layered(tmp_path, found.large, num_layers=NUM_LAYERS)
    alone = ModelSpec("main", small_bundle, small_bundle.manifest.main)
    expected = logits_of(alone.on("CPU", OPTIONS).compile())
    assert (logits_of(part.on("CPU", OPTIONS).compile(graph=slices_of(part).large)) == expected).all()
    assert (logits_of(part.on("CPU", OPTIONS).compile()) != expected).any()


@pytest.mark.slow
def test_layers_that_are_not_next_to_each_other_can_be_kept(part: ModelSpec, tmp_path: Path) -> None:
    kept = [0, 3, 7]
    few = make_layered(tmp_path, kept, num_layers=NUM_LAYERS)
    expected = logits_of(ModelSpec("main", few, few.manifest.main).on("CPU", OPTIONS).compile())
    made = keep_layers(ov.Core().read_model(part.path), NUM_LAYERS, kept)
    assert len(made.get_sinks()) == 2 * len(kept)
    graph = read_decoder(ov.Core(), made)
    assert (logits_of(part.on("CPU", OPTIONS).compile(graph=graph)) == expected).all()


def test_there_is_a_layer_of_each_kind(part: ModelSpec) -> None:
    """One layer is changed, as those with another window are."""
    model = ov.Core().read_model(part.path)
    alike = choose_layers(model, NUM_LAYERS)
    assert alike is not None
    assert 5 not in alike.large
    assert alike.times == pytest.approx((NUM_LAYERS - len(alike.small)) / (len(alike.large) - len(alike.small)))
    states = hidden_states_of(model, NUM_LAYERS)
    added = next(
        value for value in states[after_layers(6)].get_node().input_values() if len(value.get_target_inputs()) == 1
    )
    (reader,) = added.get_target_inputs()
    reader.replace_source_output(ops.multiply(added, ops.constant(np.float32(0.5))).output(0))
    mixed = choose_layers(model, NUM_LAYERS)
    assert mixed is not None
    assert mixed.small == sorted([*alike.small, 5])


def test_each_slice_has_the_output_matrix(part: ModelSpec) -> None:
    """So the whole model has more layers than weights, as multiples of a slice's."""
    found = choose_layers(ov.Core().read_model(part.path), NUM_LAYERS)
    assert found is not None
    of_layers, of_weights = found.ratios
    assert of_weights < 0.9 * of_layers


def test_few_layers_have_no_slices(part: ModelSpec) -> None:
    assert choose_layers(ov.Core().read_model(part.path), NUM_LAYERS - 1) is None  # of unknown form
    model = keep_layers(ov.Core().read_model(part.path), NUM_LAYERS, [0, 1, 2])
    assert choose_layers(model, 3) is None


def test_a_model_whose_graph_is_changed_is_measured_whole(sliced: ModelSpec) -> None:
    """Its slices would be without the cuts, and their setting and cost are not the whole's."""
    assert sliced.slices() is not None
    assert replace(sliced, cuts=(2, 6)).slices() is None


@pytest.mark.fast_cases(1)
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("kind", ["part", "hybrid"])
def test_the_whole_model_is_exact_with_the_rule_of_its_slice(kind: str, request: pytest.FixtureRequest) -> None:
    spec: ModelSpec = request.getfixturevalue(kind)
    assert spec.slices() is not None
    choice, backend = compile_settled(spec.on("CPU", OPTIONS))
    assert backend.num_layers == NUM_LAYERS
    assert choice.setting.exactness.holds
    allocate_for_trials(backend)
    # Which may pad calls more than exactness needs, where that takes no longer.
    whole = measure_exactness(backend, choice.setting.exactness)
    assert whole.holds
    assert whole.rule == choice.setting.exactness.rule


def test_layers_whose_weights_are_a_few_numbers_are_of_one_kind(hybrid: ModelSpec) -> None:
    """A gate has a number for each head, and in 8 bits a scale."""
    found = choose_layers(ov.Core().read_model(hybrid.path), NUM_LAYERS)
    assert found is not None
    assert found.small == [0, 3]
    assert {*found.large} & {1, 2, 4, 5, 6}


def test_the_scale_of_a_matrix_of_one_row_is_no_form_and_a_number_is() -> None:
    def form(scale: float, number: float) -> str:
        x, row = ops.parameter([1, 1, 8], np.float32), ops.constant(np.ones((1, 8), np.int8))
        matrix = ops.multiply(ops.convert(row, "f32"), ops.constant(np.array([[scale]], np.float32)))
        gate = ops.add(ops.matmul(x, matrix, False, True), ops.constant(np.float32(number)))
        return _form(x.output(0), ops.add(x, ops.multiply(x, gate)).output(0), "")[0]

    assert form(0.1, 1) == form(0.2, 1) != form(0.1, 2)


@pytest.mark.needs("bf16")
@pytest.mark.usefixtures("large")
def test_a_slice_shows_that_states_are_rounded_where_they_are_stored(hybrid: ModelSpec) -> None:
    slices = hybrid.slices()
    assert slices is not None
    backend = compile_for_trials(hybrid.on("CPU", OPTIONS), Setting("bf16", "bf16"), slices.large)
    assert not measure_exactness(backend).holds


@pytest.mark.slow
def test_what_is_exact_on_slices_is_exact_on_the_whole(sliced: ModelSpec) -> None:
    """In each setting that was checked, whichever were the fastest."""
    options = replace(OPTIONS, precision="auto")
    checked = [trial.setting for trial in choice_of(sliced.on("CPU", options)).trials if trial.kl is not None]
    assert checked
    for setting in checked:
        backend = sliced.on("CPU", options).compile(setting)
        backend.allocate(4096)
        assert measure_exactness(backend).holds == setting.exactness.holds, str(setting)


@pytest.mark.slow
def test_nothing_is_timed_while_something_is_compiled(sliced: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times would be those of a busy machine. The whole model is compiled once, unless its setting is replaced."""
    compiling, wholes, disturbed = list[int](), list[str](), list[int]()
    compile_it = ModelSpec.compile

    def spy(part: ModelSpec, setting: Setting, graph: ov.Model | None = None) -> CompiledModel:
        wholes.extend([setting.precision] if graph is None else [])
        compiling.append(1)
        try:
            return compile_it(part, setting, graph)
        finally:
            compiling.pop()

    def alone(name: str) -> None:
        measure = vars(measured)[name]

        def timed(*arguments: Any, **options: Any) -> Any:
            disturbed.extend(compiling)
            found = measure(*arguments, **options)
            disturbed.extend(compiling)
            return found

        monkeypatch.setattr(measured, name, timed)

    monkeypatch.setattr(ModelSpec, "compile", spy)
    alone("time_calls")
    alone("measure_pass")
    monkeypatch.setattr(
        trials, "settings_for", lambda *_: [Setting("f32", "f32", groups) for groups in (None, 64, 128)]
    )
    _, backend = compile_settled(sliced.on("CPU", OPTIONS))
    assert backend.num_layers == NUM_LAYERS
    assert backend.exactness.holds
    assert not disturbed
    assert len(wholes) in (1, 2)


@pytest.mark.slow
def test_costs_come_from_slices(sliced: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    _, backend = compile_settled(sliced.on("CPU", OPTIONS))
    backend.allocate(4096)
    monkeypatch.setattr(
        "outrider.models.cost.stored.measure_pass", lambda *_, **__: pytest.fail("the whole model is not measured")
    )
    cost = cost_of(sliced.on("CPU", OPTIONS), backend)
    assert cost.near == tuple(sorted(cost.near))
    assert cost(1) > 0


def test_what_a_layer_costs_is_the_difference_of_two_slices() -> None:
    small, large = (CallCost((1, 8), (near, 2 * near), (near + 1, 2 * near + 1), (16, 64)) for near in (3.0, 5.0))
    layers = Layers([0], [0, 1], times=10.0, ratios=(6.0, 4.0))
    found = small.combined(large, layers.whole, layers=6.0)
    assert found.near == (3 + 10 * 2, 6 + 10 * 4)
    assert found.far == (found.near[0] + 6, found.near[1] + 6)
    assert layers.whole(4.0, 3.9) == 4 * 3.9  # the noise of two times is not multiplied
    assert layers.whole(1.0, 3.0) == 6 * 3.0
