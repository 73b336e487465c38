"""Slices of models in ONNX: they have the model's kernels, and a first load measures exactness on them."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import outrider
from calls import rows_of_call
from onnx_decoder import decoder
from outrider.bundle.hashes import list_files
from outrider.bundle.manifest import Geometry, write_manifest
from outrider.config import DeviceConfig
from outrider.models.backends.onnx_slices import slice_of
from outrider.models.backends.onnxruntime import OnnxRuntime
from outrider.models.tuning import measured, model_spec
from outrider.models.tuning.loading import compile_settled
from outrider.models.tuning.measure import TRIAL_TOKENS, measure_exactness
from outrider.models.tuning.model_spec import ModelSpec
from outrider.system import saved
from outrider.testing import save_toy_bundle
from outrider.types import Chunk, CompiledModel
from outrider_export.heads.onnx_main import add_outputs, hidden_states_of

NUM_LAYERS, VOCAB = 12, 48
GEOMETRY = Geometry("toy", NUM_LAYERS, 2, 2, 32, 64, 4096, VOCAB)


def save(model: Any, folder: Path) -> Path:
    """The file of a model, with its weights in a file beside it."""
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data")
    return path


def attention_of(model: Any) -> list[Any]:
    return [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]


def layers_of(graph: bytes | None) -> list[int]:
    """The layers whose caches a slice reads."""
    assert graph is not None
    names = [each.name for each in onnx.load_from_string(graph).graph.input]
    return sorted(int(name.split(".")[1]) for name in names if name.endswith(".key"))


def logits_of(backend: OnnxRuntime) -> Any:
    """The logits of some tokens in two calls, float32 [n, vocab_size]."""
    backend.allocate(64)
    slot = backend.open(64)
    assert slot is not None
    rows = []
    for token_ids in ([*range(5, 25)], [*range(30, 40)]):
        rows += [*rows_of_call(backend, Chunk(slot, token_ids, num_rows=len(token_ids)))]
    slot.close()
    return np.array(rows)


def test_a_slice_has_the_bits_of_the_model_when_the_other_layers_add_nothing(tmp_path: Path) -> None:
    model = decoder(GEOMETRY)
    last = NUM_LAYERS - 1
    tensors = {each.name: each for each in model.graph.initializer}
    for i in range(3, last):
        for name in (f"{i}.o.weight", f"{i}.down.weight"):
            nothing = np.zeros_like(numpy_helper.to_array(tensors[name]))
            tensors[name].CopyFrom(numpy_helper.from_array(nothing, name))
    for name in ("input_norm", "q", "k", "v"):  # the slice's last attention reads what the fourth layer's would
        fourth = numpy_helper.to_array(tensors[f"3.{name}.weight"])
        tensors[f"{last}.{name}.weight"].CopyFrom(numpy_helper.from_array(fourth, f"{last}.{name}.weight"))
    add_outputs(model, hidden_states_of(model), ["hidden_states.2", "hidden_states.6", "last_hidden_state"], 64)
    path = save(model, tmp_path)
    graph = slice_of(path)
    assert layers_of(graph) == [0, 1, 2, last]
    whole, sliced = (OnnxRuntime(path, vocab_size=VOCAB, graph=each) for each in (None, graph))
    np.testing.assert_array_equal(logits_of(sliced), logits_of(whole))


@pytest.mark.parametrize(("other", "expected"), [(3, [0, 1, 2, 3, 4, NUM_LAYERS - 1]), (7, None)])
def test_a_slice_has_a_layer_of_each_form_or_there_is_none(
    other: int, expected: list[int] | None, tmp_path: Path
) -> None:
    model = decoder(GEOMETRY)
    attention_of(model)[other].attribute.append(onnx.helper.make_attribute("local_window_size", 16))
    graph = slice_of(save(model, tmp_path))
    assert (graph and layers_of(graph)) == expected


@pytest.mark.parametrize("form", ["a value of a far layer", "few layers", "attention in another order"])
def test_models_of_another_form_have_no_slice(form: str, tmp_path: Path) -> None:
    geometry = msgspec.structs.replace(GEOMETRY, num_layers=6) if form == "few layers" else GEOMETRY
    model = decoder(geometry)
    if form == "a value of a far layer":
        last = next(node for node in model.graph.node if f"{NUM_LAYERS - 1}.middle" in node.output)
        last.input[0] = "5.middle"
    elif form == "attention in another order":
        swapped = {f"{kind}.{a}.{half}": f"{kind}.{b}.{half}" for a, b in ((2, 3), (3, 2))
                   for kind in ("past_key_values", "present") for half in ("key", "value")}  # fmt: skip
        for node in attention_of(model)[2:4]:
            node.input[:] = [swapped.get(name, name) for name in node.input]
            node.output[:] = [swapped.get(name, name) for name in node.output]
    assert slice_of(save(model, tmp_path)) is None


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """A main model that counts as large enough for a slice."""
    folder = tmp_path / "bundle"
    made = save_toy_bundle(folder, formats=("onnx", "onnx"), draft=False, vocab_size=40)
    save(decoder(GEOMETRY), made.model_path(made.manifest.main).parent)
    main = msgspec.structs.replace(made.manifest.main, geometry=GEOMETRY)
    write_manifest(folder, msgspec.structs.replace(made.manifest, main=main, files=list_files(folder)))
    monkeypatch.setattr(model_spec, "SMALL", 0)
    monkeypatch.setattr(saved, "FOLDER", tmp_path / "cache")
    bundle = outrider.read_bundle(folder)
    return ModelSpec("main", bundle, bundle.manifest.main, options=DeviceConfig(measure="first"))


def test_a_first_load_measures_exactness_on_a_slice_and_finds_the_models_own(
    part: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def observed(backend: CompiledModel) -> Any:
        seen.append(backend.num_layers)
        return measure_exactness(backend)

    monkeypatch.setattr(measured, "measure_exactness", observed)
    _, backend = compile_settled(part)
    assert (seen, backend.num_layers) == ([4], NUM_LAYERS)
    found = backend.exactness
    backend.allocate(TRIAL_TOKENS)
    whole = measure_exactness(backend)
    assert (found.holds, found.groups, found.rule) == (whole.holds, whole.groups, whole.rule)
    compile_settled(part)
    assert seen == [4]


def test_small_models_and_other_devices_have_no_slice(part: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert part.onnx_slice() is not None
    assert part.on("CUDA", DeviceConfig()).onnx_slice() is None
    monkeypatch.setattr(model_spec, "SMALL", 1 << 40)
    assert part.onnx_slice() is None
