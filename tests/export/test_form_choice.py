"""The form that a machine chooses for a model: by its times, within a floor of quality, and once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pytest

from exports import Recorder
from outrider.config import Config
from outrider.errors import ExportError
from outrider.models.backends.columns import COLUMNS
from outrider.models.tuning.measure import estimate_padding, exactness
from outrider.models.tuning.setting import Setting
from outrider.system import saved
from outrider.types import Exactness, Rounding, RowRule
from outrider_export import export_bundle
from outrider_export.forms import choice as form_choice
from outrider_export.forms import slices as form_slices
from outrider_export.forms.choice import FormChoice
from outrider_export.forms.slices import FormSlices, Whole, time_slices
from outrider_export.forms.speed import ROWS, FormSpeed

if TYPE_CHECKING:
    from collections.abc import Sequence

# Milliseconds of a call of 1, 2, 4 and 8 rows, as in docs/export.md: on a processor with AVX2 alone, and one with VNNI.
AVX2: dict[str, tuple[float, ...]] = {
    "openvino int8": (130, 128, 195, 309), "openvino int4": (105, 132, 127, 258),
    "onnx int8": (122, 94, 160, 246), "onnx int4": (74, 85, 131, 235),
}  # fmt: skip
VNNI: dict[str, tuple[float, ...]] = {
    "openvino int8": (34.5, 36.6, 40.8, 46.2), "openvino int4": (34.5, 33.9, 38.5, 53.0),
    "onnx int8": (40.7, 40.9, 47.7, 61.7), "onnx int4": (25.6, 26.4, 37.7, 60.2),
}  # fmt: skip


class FakeTrial:
    """A trial without slices. times: by form; of draft models, a row takes a quarter of that. kl: of every form."""

    times = AVX2
    kl = 0.05
    is_settled = True
    made: ClassVar[list[str]] = []

    def __init__(self, plan: Any, *_: Any) -> None:
        self.role = plan.role
        self.made.append(plan.role)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(
        self, forms: Sequence[tuple[Any, str]], rows: Sequence[int], cuts: Sequence[int] = ()
    ) -> list[FormSpeed]:
        taken = {form: self.times[" ".join(form)] for form in forms if " ".join(form) in self.times}
        share = 1.0 if self.role == "main" else 0.25
        found = {form: {n: share * taken[form][ROWS.index(n)] / 1000 for n in rows} for form in taken}
        return [
            FormSpeed(*form, seconds, dict.fromkeys(cuts, seconds[1] / 2), 1, "") for form, seconds in found.items()
        ]

    def slice_kl(self, forms: Sequence[FormSpeed]) -> list[FormSpeed]:
        return [replace(form, slice_kl=self.kl) for form in forms]


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[FakeTrial]:
    """Trials of toys, as if they were large, with nothing saved."""
    made = type("Trial", (FakeTrial,), {"made": []})
    monkeypatch.setattr(form_choice, "FormTrial", made)
    monkeypatch.setattr(form_choice, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(saved, "FOLDER", tmp_path / "saved")
    return made


def exported(folder: Path, *models: Path, **options: Any) -> tuple[list[str], list[str]]:
    """The forms of an export's models, and its notes."""
    told = Recorder()
    manifest = export_bundle(*models, output=folder, progress=told, **options).manifest
    entries = [manifest.main, *(drafter.model for drafter in manifest.drafters)]
    for entry in entries:
        assert ("chosen" in entry.source.recipe) == any(entry.source.recipe.get("chosen", "-") in n for n in told.notes)
    return [f"{entry.format} {entry.weights}" for entry in entries], told.notes


def test_the_fastest_form_is_taken_and_remembered(trial: type[FakeTrial], tied: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    forms, notes = exported(tmp_path / "a", tied, tied)
    assert forms == ["onnx int4", "onnx int4"]
    assert "tied in int4 in ONNX: 1.76 times as fast as int8 in OpenVINO here for a token, 1.31 times for 8" in notes[0]
    assert trial.made == ["main", "draft"]
    again, said = exported(tmp_path / "b", tied, tied)
    assert (again, said) == (forms, notes)
    assert trial.made == ["main", "draft"]  # once


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("four_bits", "chosen"), [(25.6, "onnx int4"), (32.5, "openvino int8")])
def test_a_draft_model_gets_another_library_than_the_main_model_where_that_is_faster(
    four_bits: float, chosen: str, trial: type[FakeTrial], tied: Path, tmp_path: Path
) -> None:
    """A twentieth less time for a draft token makes decoding less than 2 % faster: that is not enough."""
    pytest.importorskip("onnxruntime")
    trial.times = {**VNNI, "onnx int4": (four_bits, 33, 50, 70)}
    forms, notes = exported(tmp_path / "a", tied, tied)
    assert forms == ["openvino int8", chosen]
    assert "0.25 in int8 in OpenVINO, 0.25 in int4 in OpenVINO" in notes[1]
    assert f"{four_bits / 34.5 / 4:.2f} in int4 in ONNX" in notes[1]
    asked = exported(tmp_path / "b", tied, tied, draft_format="openvino")[0]
    assert asked == ["openvino int8", "openvino int8"]


def test_a_model_that_is_not_for_onnx_is_tried_in_the_other_forms_alone(trial: type[FakeTrial], tmp_path: Path) -> None:
    """Such as one whose layers keep states, which is told apart before any slice is converted."""
    pytest.importorskip("torch")
    from qwen_module import write_qwen

    write_qwen(tmp_path / "qwen")
    trial.times = {"openvino int8": (100, 101, 150, 300), "openvino int4": (50, 51, 80, 150)}
    forms, _ = exported(tmp_path / "a", tmp_path / "qwen", draft="none")
    assert forms == ["openvino int4"]


@pytest.mark.slow
def test_a_form_is_chosen_again_with_other_kernels(
    trial: type[FakeTrial], tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(tmp_path / "a", tied)
    monkeypatch.setattr(form_choice, "versions_of", lambda *_: {"openvino": "another"})
    exported(tmp_path / "b", tied)
    assert trial.made == ["main", "main"]


def test_what_is_asked_for_is_not_chosen(trial: type[FakeTrial], tied: Path, tmp_path: Path) -> None:
    asked: Any = ({"weights": "int8"}, {"format": "openvino"}, {"for_this_machine": False})
    for number, options in enumerate(asked):
        assert exported(tmp_path / str(number), tied, **options)[0] == ["openvino int8"]
    assert not trial.made
    pytest.importorskip("onnxruntime")
    forms, _ = exported(tmp_path / "draft", tied, tied, draft_weights="fp16", draft_format="openvino")
    assert (forms, trial.made) == (["onnx int4", "openvino fp16"], ["main"])
    assert exported(tmp_path / "as-main", tied, tied, draft_weights="fp32")[0] == ["onnx int4", "onnx fp32"]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("change", "why"), [
    ({"times": VNNI}, "no other form is faster enough here"),
    ({"kl": 0.11}, "no other form is faster enough here"),
    ({"is_settled": False}, "the machine is too busy to time models"),
])  # fmt: skip
def test_the_portable_form_stays(
    change: dict[str, Any], why: str, trial: type[FakeTrial], tied: Path, tmp_path: Path
) -> None:
    for name, value in change.items():
        setattr(trial, name, value)
    forms, notes = exported(tmp_path / "a", tied)
    assert forms == ["openvino int8"]
    assert why in notes[0]
    exported(tmp_path / "b", tied)
    assert len(trial.made) == (1 if trial.is_settled else 2)  # what a busy machine says is not kept


@pytest.mark.slow
def test_a_model_that_cannot_be_cut_is_exported(
    trial: type[FakeTrial], tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ExportError("no slices")

    monkeypatch.setattr(trial, "measure", refuse)
    forms, notes = exported(tmp_path / "a", tied)
    assert forms == ["openvino int8"]
    assert notes == ["The form of tied is not chosen by this machine: no slices"]


def test_small_models_are_not_timed(
    trial: type[FakeTrial], tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(form_choice, "FormTrial", trial)
    assert exported(tmp_path / "a", tied)[0] == ["openvino int8"]
    assert not trial.made


@pytest.mark.parametrize(("options", "free"), [
    ({}, True), ({"num_threads": 2}, True), ({"main_device": "GPU"}, False), ({"draft_device": "GPU"}, False),
    ({"precision": "bf16"}, False), ({"cache_precision": "u8"}, False), ({"main_properties": {"A": "B"}}, False),
])  # fmt: skip
def test_options_of_one_library_keep_openvino(options: dict[str, Any], free: bool) -> None:
    assert Config().replace(**options).device.takes_any_form == free


def test_choices_that_are_damaged_are_refused() -> None:
    with pytest.raises(ValueError, match="a form"):
        FormChoice("onnx", "int3", "", {}, {})
    with pytest.raises(ValueError, match="takes seconds"):
        FormChoice("onnx", "int4", "", {1: -1.0}, {})
    with pytest.raises(ValueError, match="draft token takes seconds"):
        FormChoice("onnx", "int4", "", {}, {100: -1.0})


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
