"""The form of a model's weights: by the table of processors, or measured on slices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exports import Recorder
from outrider.config import Config
from outrider.models.backends.columns import COLUMNS
from outrider.models.tuning.machines import Machine
from outrider.models.tuning.measure import estimate_padding, exactness
from outrider.models.tuning.setting import Setting
from outrider.types import Exactness, Rounding, RowRule
from outrider_export import export_bundle
from outrider_export.weights_choice import choice
from outrider_export.weights_choice import slices as form_slices
from outrider_export.weights_choice.slices import FormSlices, Whole, time_slices

ALONE = Machine("AVX2 alone", ("onnx int4", "openvino int8"), ("onnx int4", "openvino int4"), 81_920, 0.1)
VNNI = Machine("VNNI", ("openvino int8",), ("onnx int4", "openvino int4"), 81_920, 0.1)
O8, O4, X8, X4 = "openvino int8", "openvino int4", "onnx int8", "onnx int4"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toys count as large, on a processor with AVX2 alone."""
    monkeypatch.setattr(choice, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(choice, "this_machine", lambda: ALONE)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(("kind", "change", "options", "expected"), [
    ("Q4_0", {}, {}, [X4, X4]), ("Q4_0", {"this_machine": lambda: VNNI}, {}, [O8, X4]),
    ("Q8_0", {}, {}, [O8, X4]),  # a main model is not rounded to 4 bits
    ("Q4_0", {"_has_onnx": lambda: False}, {}, [O8, O4]), ("Q4_0", {"LEAST_WEIGHTS": 10**9}, {}, [O8, O8]),
    ("Q4_0", {}, {"weights": "int8"}, [O8, O8]), ("Q4_0", {}, {"format": "onnx"}, [X8, X8]),
    ("Q4_0", {}, {"for_this_machine": False}, [O8, O8]), ("Q4_0", {}, {"draft_weights": "fp32"}, [X4, "onnx fp32"]),
    ("Q4_0", {}, {"draft_format": "openvino"}, [X4, O8]),
    ("Q4_0", {}, {"draft_weights": "fp16", "draft_format": "openvino"}, [X4, "openvino fp16"]),
])  # fmt: skip
@pytest.mark.usefixtures("machine")
def test_models_have_the_best_form_of_the_table(
    kind: str,
    change: dict[str, Any],
    options: dict[str, Any],
    expected: list[str],
    tied: Path,
    make_gguf: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first that a model and the installation can have. What is asked for is not chosen."""
    pytest.importorskip("onnxruntime")
    for name, value in change.items():
        monkeypatch.setattr(choice, name, value)
    model, told = make_gguf(f"choice-{kind}", tied, quantisation=kind), Recorder()
    manifest = export_bundle(model, model, output=tmp_path / "bundle", progress=told, **options).manifest
    entries = [manifest.main, *(drafter.model for drafter in manifest.drafters)]
    assert [f"{entry.format} {entry.weights}" for entry in entries] == expected
    chosen = [entry.source.recipe["chosen"] for entry in entries if "chosen" in entry.source.recipe]
    assert [note for note in told.notes if "the fastest on" in note] == [
        f"{model.name} in {form.split()[1]} in {'ONNX' if 'onnx' in form else 'OpenVINO'}: {why}."
        for form, why in zip(expected, chosen, strict=False)
    ]


@pytest.mark.parametrize(("options", "free"), [
    ({}, True), ({"num_threads": 2}, True), ({"main_device": "GPU"}, False), ({"draft_device": "GPU"}, False),
    ({"precision": "bf16"}, False), ({"cache_precision": "u8"}, False), ({"main_properties": {"A": "B"}}, False),
])  # fmt: skip
def test_options_of_one_library_keep_openvino(options: dict[str, Any], free: bool) -> None:
    assert Config().replace(**options).device.takes_any_form == free


@pytest.mark.parametrize(("groups", "apart", "padded"), [
    ([(1, 2, 3, 4, 5, 6, 8)], False, 1), ([(1,), (2, 3, 4, 5, 6, 8)], False, 2),
    ([(1,), (2, 3, 4), (5, 6, 8)], False, 5), ([(1,), (2, 3, 4, 5, 6, 8)], True, 1),
])  # fmt: skip
def test_padding_is_estimated(
    groups: list[tuple[int, ...]], apart: bool, padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apart: whether padding the attention alone is enough."""
    used: list[Exactness] = []
    backend: Any = SimpleNamespace(can_pad_apart=apart, use=used.append)
    alike = [(1, 2, 3, 4, 5, 6, 8)]
    monkeypatch.setattr(exactness, "_groups", lambda *_: alike if used[-1].rule.apart else groups)
    rule = estimate_padding(backend).rule
    assert (rule.num_rows([1]) if not rule.apart else rule.call(1)) == padded


@pytest.mark.parametrize(("rows", "with_zeros", "columns"), [(5, 2, COLUMNS), (5, 5, 0), (2, 1, 0)])
def test_slices_have_columns_of_zeros_where_rows_are_fewer(
    rows: int, with_zeros: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a first load compiles the whole model."""

    def compile_part(setting: Setting) -> Any:
        rule = RowRule(sequence=Rounding(with_zeros if setting.columns else rows))
        return SimpleNamespace(columns=setting.columns, exactness=Exactness(rule=rule), use=lambda _: None)

    part: Any = SimpleNamespace(compile=compile_part, can_append=lambda: True)
    part.on = lambda *_: part
    setting = Setting("f32", "f32")
    monkeypatch.setattr(form_slices, "_convert", lambda *_: part)
    monkeypatch.setattr(form_slices, "settings_for", lambda *_: iter([setting]))
    monkeypatch.setattr(form_slices, "compile_for_trials", lambda part, setting, **_: part.compile(setting))
    monkeypatch.setattr(form_slices, "estimate_padding", lambda backend: backend.exactness)
    none: Any = None
    made = FormSlices.make([none, none], ("openvino", "int8"), Path("slices"), Config(), none, "main", none)
    backends: Any = made.backends
    assert [backend.columns for backend in backends] == [columns, columns]
    assert made.setting == str(replace(setting, columns=columns))


def slices(weights: str) -> FormSlices:
    """Slices without backends: of one layer, of three layers, and of one with more tokens."""
    sizes = ((1, 100), (3, 100), (1, 200))
    checkpoints = [form_slices.SliceCheckpoint(Path(), *each) for each in sizes]
    backends: Any = [f"{name} {weights}" for name in TAKEN]
    return FormSlices("onnx", weights, Whole(11, 600), checkpoints, [], "", backends, [{}, {}, {}])


TAKEN = {"small": 1.0, "large": 2.0, "wide": 1.25}  # seconds of a call of one row


def test_times_of_a_busy_machine_are_those_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other call waits; the whole model's time is that of its layers and of its output matrix."""
    eight, four = slices("int8"), slices("int4")
    calls: Counter[Any] = Counter()

    def take(backend: Any, rows: int) -> tuple[float, float]:
        calls[backend] += 1
        spent = TAKEN[backend.split()[0]] * rows
        return spent * (20.0 if calls[backend] % 2 else 0.5), spent

    monkeypatch.setattr(form_slices, "_time", take)
    assert time_slices([eight, four], (1,), 1.0)
    # Ten more layers are five times two; a hundred more tokens take 0.25.
    assert four.seconds(1) == pytest.approx(0.5 * (1 + 5 * 1 + 5 * 0.25), rel=0.03)
    assert four.seconds(1, 100) == pytest.approx(0.5 * 6, rel=0.03)
    busy = slices("int8")
    monkeypatch.setattr(form_slices, "_time", lambda backend, _: (9.0, TAKEN[backend.split()[0]]))
    assert not time_slices([busy], (1,), 1.0)
    assert busy.seconds(1, 100) == pytest.approx(6)  # as if it had not waited


def test_a_call_that_no_other_confirms_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes much less than all others happens on a virtual machine; layers would seem to take more for it."""
    form = slices("int8")
    rare = iter([TAKEN["small"], 0.7 * TAKEN["small"]])

    def take(backend: str, _: int) -> tuple[float, float]:
        taken = TAKEN[backend.split()[0]]
        each = next(rare, taken) if backend.startswith("small") else taken
        return each, each

    monkeypatch.setattr(form_slices, "_time", take)
    assert time_slices([form], (1,), 1.0)
    assert form.seconds(1, 100) == pytest.approx(6)
