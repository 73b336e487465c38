"""Columns of zeros that are appended to products, so that rows have the same bits in more calls."""

from typing import Any

import numpy as np
import openvino as ov
import pytest
from numpy.typing import NDArray
from openvino import opset13 as ops

from calls import rows_of_call
from outrider.bundle import Bundle
from outrider.models.backends.columns import COLUMNS, append_columns, can_append, has_dependent
from outrider.models.backends.nodes import result
from outrider.models.backends.paged_graph import read_decoder
from outrider.models.backends.registry import compile_model
from outrider.models.backends.taps import output_matrix_of
from outrider.models.tuning.loading import LoadedModel
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.setting import Choice, Setting
from outrider.system.core import new_core
from outrider.types import Chunk

WIDE, NARROW, VOCAB_SIZE = 4_352, 64, 16_000
ROWS = (2, 3, 4, 5, 8, 16)


def weight(kind: str, num_rows: int, num_columns: int, *, group: int = 0) -> ov.Node:
    """A random weight in 8 bits with its scales, as exports write it. kind: u8, which has zero points, or i8."""
    rng = np.random.default_rng(num_rows)
    limits, kind_of = ((0, 256), np.uint8) if kind == "u8" else ((-128, 128), np.int8)
    shape = (num_rows, num_columns // group, group) if group else (num_rows, num_columns)
    value = ops.convert(ops.constant(rng.integers(*limits, shape, dtype=kind_of)), "f16")
    of_rows = (*shape[:-1], 1)
    if kind == "u8":
        points = ops.constant(rng.integers(100, 156, of_rows, dtype=np.uint8))
        value = ops.subtract(value, ops.convert(points, "f16"))
    value = ops.multiply(value, ops.constant(rng.uniform(0.0001, 0.001, of_rows).astype(np.float16)))
    if group:
        value = ops.reshape(value, ops.constant(np.array([num_rows, num_columns])), False)
    return ops.convert(value, "f32")


def decoder_end(kind: str = "u8", num_columns: int = WIDE, *, group: int = 0) -> ov.Model:
    """The end of a decoder: x [n, 1, columns] is multiplied by a weight, and by the output matrix."""
    x = ops.parameter([-1, 1, num_columns], np.float32)
    narrow = ops.matmul(x, weight(kind, NARROW, num_columns, group=group), False, True)
    logits = ops.matmul(narrow, weight("i8", VOCAB_SIZE, NARROW), False, True)
    return ov.Model([result("logits", logits), result("narrow", narrow)], [x])


def narrow_of(model: ov.Model) -> list[NDArray[np.float32]]:
    """The same row of `narrow`, in calls of `ROWS` rows."""
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 2}
    request: Any = new_core().compile_model(model, "CPU", hints).create_infer_request()
    row, found = np.random.default_rng(0).standard_normal(WIDE).astype(np.float32), []
    for count in ROWS:
        x = np.random.default_rng(count).standard_normal((count, 1, WIDE)).astype(np.float32)
        x[-1, 0] = row
        request.infer([x])
        found.append(request.get_tensor("narrow").data[-1, 0].copy())
    return found


def shapes_of(model: ov.Model) -> list[list[int]]:
    """The shapes of all products' weights, [rows, columns]."""
    return [[*node.input_value(1).get_shape()] for node in model.get_ordered_ops() if node.get_type_name() == "MatMul"]


@pytest.mark.parametrize("kind", ["u8", "i8"])
def test_a_row_has_the_same_numbers_with_more_columns(kind: str) -> None:
    model = decoder_end(kind)
    before = narrow_of(model.clone())[0]
    assert can_append(model)
    assert has_dependent(model)
    append_columns(model, COLUMNS)
    assert not has_dependent(model)
    assert shapes_of(model) == [[NARROW, COLUMNS], [VOCAB_SIZE, NARROW]]
    assert np.allclose(narrow_of(model), before, rtol=0, atol=1e-5 * np.abs(before).max())


@pytest.mark.needs("avx512f")  # with AVX2 alone, some processors have other bits from 5 rows on: loading measures it
@pytest.mark.parametrize("kind", ["u8", "i8"])
def test_a_row_has_the_same_bits_in_all_calls_with_more_columns(kind: str) -> None:
    model = decoder_end(kind)
    append_columns(model, COLUMNS)
    rows = narrow_of(model)
    assert all((row == rows[0]).all() for row in rows)  # without the columns, on some processors, not from 5 rows on


def test_products_of_the_same_rows_read_the_same_zeros() -> None:
    x = ops.parameter([-1, 1, WIDE], np.float32)
    both = [ops.matmul(x, weight(kind, NARROW, WIDE), False, True) for kind in ("u8", "i8")]
    logits = ops.matmul(ops.add(*both), weight("u8", VOCAB_SIZE, NARROW), False, True)
    model = ov.Model([result("logits", logits)], [x])
    append_columns(model, COLUMNS)
    assert shapes_of(model) == [[NARROW, COLUMNS], [NARROW, COLUMNS], [VOCAB_SIZE, NARROW]]
    assert [node.get_type_name() for node in model.get_ops()].count("Pad") == 1


@pytest.mark.parametrize("model", [
    pytest.param(decoder_end(num_columns=4_096), id="as many columns as need two rows"),
    pytest.param(decoder_end(num_columns=COLUMNS), id="enough columns"),
    pytest.param(decoder_end(group=32), id="weights in groups"),
])  # fmt: skip
def test_other_products_stay(model: ov.Model) -> None:
    shapes = shapes_of(model)
    assert not can_append(model)
    append_columns(model, COLUMNS)
    assert shapes_of(model) == shapes
    assert "Pad" not in {node.get_type_name() for node in model.get_ops()}


def test_the_output_matrix_and_weights_of_others_stay() -> None:
    x = ops.parameter([-1, 1, WIDE], np.float32)
    shared = weight("u8", WIDE, WIDE)
    logits = ops.matmul(
        ops.matmul(ops.matmul(x, shared, False, True), shared, False, True), weight("i8", 8, WIDE), False, True
    )
    model = ov.Model([result("logits", logits)], [x])
    shapes = shapes_of(model)
    assert not can_append(model)
    append_columns(model, COLUMNS)
    assert shapes_of(model) == shapes


def test_a_model_that_would_be_much_larger_stays() -> None:
    model = decoder_end()
    logits = model.output("logits").get_node().input_value(0).get_node()
    logits.input(1).replace_source_output(weight("i8", 100, NARROW).output(0))
    model.validate_nodes_and_infer_types()
    assert not can_append(model)


def test_a_model_in_this_setting_says_so_and_has_its_logits(
    openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = ModelSpec("main", openvino_bundle, openvino_bundle.manifest.main)
    graph = read_decoder(new_core(), part.path)
    product = output_matrix_of(graph)
    assert product is not None
    rows = product.input_value(0)
    width = rows.get_partial_shape()[2].get_length()
    wider = ops.matmul(
        rows, ops.constant(np.random.default_rng(0).standard_normal((width, WIDE), np.float32)), False, False
    )
    more = ops.matmul(ops.tanh(wider), weight("u8", width, WIDE), False, True)
    product.input(0).replace_source_output(ops.add(rows, more).output(0))
    graph.validate_nodes_and_infer_types()
    monkeypatch.setattr("outrider.models.backends.paged_graph.read_decoder", lambda *_, **__: graph.clone())
    monkeypatch.setattr("outrider.models.backends.openvino_paged.can_append", lambda _: True)  # for all that it adds
    logits, said, identities = [], [], []
    for columns in (0, COLUMNS):
        setting = Setting("f32", "auto", columns=columns)
        backend = compile_model(part, setting)
        backend.allocate(64)
        slot = backend.open(16)
        assert slot is not None
        logits.append(rows_of_call(backend, Chunk(slot, [5, 6, 7], num_rows=3)))
        loaded = LoadedModel(part, Choice(setting), backend)
        said.append(loaded.setting)
        identities.append(loaded.identity)
    assert np.abs(logits[1] - logits[0]).max() <= 1e-4 * np.abs(logits[0]).max()
    assert said[1] == said[0].replace(", OpenVINO", ", products of 8,224 columns, OpenVINO")
    assert identities[1]["call"] == identities[0]["call"] | {"columns": "8224"}  # costs and prefixes are of one setting
