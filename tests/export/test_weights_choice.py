"""The form of a model's weights: by the table of processors."""

from pathlib import Path
from typing import Any

import pytest

from exports import Recorder
from outrider.config import Config
from outrider.models.tuning.machines import Machine
from outrider_export import add_drafter, export_bundle
from outrider_export.weights_choice import choice

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
    if not any("draft" in name for name in options):
        added = add_drafter(tmp_path / "bundle", model, name="again").manifest.drafters[-1].model
        assert f"{added.format} {added.weights}" == expected[1]


@pytest.mark.parametrize(("options", "free"), [
    ({}, True), ({"num_threads": 2}, True), ({"main_device": "GPU"}, False), ({"draft_device": "GPU"}, False),
    ({"precision": "bf16"}, False), ({"cache_precision": "u8"}, False), ({"main_properties": {"A": "B"}}, False),
])  # fmt: skip
def test_options_of_one_library_keep_openvino(options: dict[str, Any], free: bool) -> None:
    assert Config().replace(**options).device.takes_any_form == free
