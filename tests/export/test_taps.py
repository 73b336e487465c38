"""The hidden states that drafters read are those of the model in PyTorch."""

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from transformers import AutoModelForCausalLM

from answering import torch_model_of
from calls import rows_of_call
from outrider.bundle import Bundle, read_bundle
from outrider.errors import BundleError
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.paged_graph import read_decoder
from outrider.models.backends.taps import hidden_states_of
from outrider.types import Chunk, Exactness, Rounding, RowRule
from outrider_export import export_bundle

NAMES = ("hidden_states.0", "hidden_states.1", "hidden_states.2", "last_hidden_state")
RULES = (RowRule(), RowRule(call=Rounding(8, 8)), RowRule(separate=True, dummy_rows=2))


@pytest.fixture(scope="module", params=["Q8_0", "Q4_1", pytest.param("fp32", marks=pytest.mark.slow)])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Any, float]:
    """A bundle, the same model in PyTorch, and how far their hidden states may be apart, as a share of the largest."""
    if request.param == "fp32":
        tied = request.getfixturevalue("tied")
        bundle = request.getfixturevalue("convert")(tied, weights="fp32")[0]
        return bundle, AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32).eval(), 1e-5
    path = tmp_path_factory.mktemp("taps")
    make, checkpoint = request.getfixturevalue("make_gguf"), request.getfixturevalue("tied")
    file = make(f"taps-{request.param}", checkpoint, quantisation=request.param)
    bundle = export_bundle(file, output=path / "bundle", weights="fp16" if request.param == "Q8_0" else "int4")
    # The minima of Q4_1 are stored in a few bits.
    return bundle, torch_model_of(file), {"Q8_0": 1e-3, "Q4_1": 0.02}[request.param]


def load(bundle: Bundle, features: tuple[str, ...], precision: str = "f32", rule: RowRule = RULES[0]) -> OpenVINOPaged:
    path = bundle.model_path(bundle.manifest.main)
    groups = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"} if precision == "f32" else {}
    build = functools.partial(read_decoder, features=features)
    options: dict[str, Any] = {"precision": precision, "properties": groups, "features": features, "build": build}
    backend = OpenVINOPaged(path, vocab_size=404, **options)
    backend.use(Exactness(rule=rule))
    backend.allocate(1024)
    return backend


def expected(model: Any, token_ids: list[int]) -> dict[str, Any]:
    """float32 [tokens, hidden] by name. After the last layer, before the norm, Transformers gives none."""
    outs: list[Any] = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, inputs, out: outs.append(out))
    with torch.no_grad():
        states = model(torch.tensor(token_ids)[None], output_hidden_states=True).hidden_states
    hook.remove()
    after = outs[0][0] if isinstance(outs[0], tuple) else outs[0]
    rows = [*(each[0] for each in states[:-1]), after.reshape(-1, states[0].shape[-1]), states[-1][0]]
    return dict(zip(NAMES, (each.numpy() for each in rows), strict=True))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_hidden_states_are_those_of_transformers(both: tuple[Bundle, Any, float], rule: RowRule) -> None:
    """Of prompts and answers, for several sequences in one call, and in any order of names."""
    bundle, model, tolerance = both
    rng = np.random.default_rng(1)
    texts = [rng.integers(20, 400, 60).tolist() for _ in range(3)]
    backend = load(bundle, NAMES, rule=rule)
    assert backend.capabilities.features == NAMES
    slots = [backend.open(80) for _ in texts]
    wanted = [NAMES, (NAMES[3],), (NAMES[2], NAMES[0])]
    right = [expected(model, text) for text in texts]
    ends = [(33, 34, 39, 60), (1, 45, 46, 60), (20, 21, 22, 23)]
    begins = [0, 0, 0]
    for i in range(4):
        order = [[0, 1, 2], [2, 0, 1], [1], [1, 2, 0]][i]
        chunks = [
            Chunk(
                slots[j], texts[j][begins[j] : ends[j][i]], int(j < 2), wanted[j], generated=ends[j][i] - begins[j] < 8
            )
            for j in order
            if ends[j][i] > begins[j]
        ]
        step = backend.submit(chunks).wait()
        for j, chunk in zip(order, chunks, strict=True):
            part = slice(begins[j], ends[j][i])
            found = np.split(step.features(chunk), len(wanted[j]), axis=1)
            for name, rows in zip(wanted[j], found, strict=True):
                np.testing.assert_allclose(rows, right[j][name][part], atol=tolerance * np.abs(right[j][name]).max())
            begins[j] = ends[j][i]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("precision", ["f32", "auto"])
def test_no_bit_of_the_logits_changes(both: tuple[Bundle, Any, float], precision: str) -> None:
    bundle, _, _ = both
    made = []
    token_ids = np.random.default_rng(2).integers(20, 400, 50).tolist()
    for features in ((), NAMES[1:2], NAMES):
        backend = load(bundle, features, precision)
        slot, rows = backend.open(80), []
        for begin, end in itertools.pairwise((0, 30, 31, 36, 50)):
            rows += [*rows_of_call(backend, Chunk(slot, token_ids[begin:end], 2 if end - begin > 1 else 1, features))]
        made.append(np.stack(rows))
    np.testing.assert_array_equal(made[0], made[1])
    np.testing.assert_array_equal(made[0], made[2])


def test_a_layer_that_is_not_there_is_named(tiny: Path) -> None:
    with pytest.raises(
        BundleError, match=r"needs the main model's hidden states 'hidden_states.3', which are not found"
    ):
        load(read_bundle(tiny), ("hidden_states.2", "hidden_states.3"))


def test_a_model_of_another_form_is_refused(openvino_bundle: Bundle) -> None:
    path = openvino_bundle.model_path(openvino_bundle.manifest.main)
    with pytest.raises(BundleError, match="which are not found in its graph. Load it with drafter='suffix'"):
        read_decoder(ov.Core(), path, ("last_hidden_state",))
    assert hidden_states_of(ov.Core().read_model(path), 2) == {}
    read_decoder(ov.Core(), path)


def test_the_number_of_layers_has_to_fit(tiny: Path) -> None:
    path = read_bundle(tiny).model_path(read_bundle(tiny).manifest.main)
    for num_layers in (1, 3):
        assert hidden_states_of(ov.Core().read_model(path), num_layers) == {}
    assert {*hidden_states_of(ov.Core().read_model(path), 2)} == {*NAMES}
