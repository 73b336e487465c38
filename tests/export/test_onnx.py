"""From checkpoints and GGUF files to bundles with models in ONNX."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from transformers import AutoModelForCausalLM

import exports
import shapes
from onnx_runs import run_onnx
from outrider.bundle import Bundle
from outrider.errors import ExportError, OptionError
from outrider_export import export_bundle
from outrider_export.direct.convert import open_weights
from outrider_export.direct.onnx_pack import OnnxMatrix
from outrider_export.direct.weights import StoredMatrix
from outrider_export.onnx.files import OnnxWeights, load
from outrider_export.onnx.matrices import dequantise, quantise

pytestmark = pytest.mark.children

IDS = [*range(20, 52)]


def logits_of(folder: Path, rows: tuple[int, int] | None = None, extra: int = 0) -> Any:
    """float32 [tokens, logits width] of the model in `folder`; all rows, or some. extra: that attention alone sees."""
    chosen = {} if rows is None else {"rows_begin": np.array([rows[0]]), "rows_end": np.array([rows[1]])}
    cosines = next(t for t in load(folder / "model.onnx").graph.initializer if t.name == "cos_cache")
    more = {"attention_mask": np.ones((1, len(IDS) + extra), np.int64), "extra_rows": np.array([extra])}
    (found,) = run_onnx(folder / "model.onnx", IDS, head_size=2 * cosines.dims[1], **chosen, **(more if extra else {}))
    return found


def error_of(bundle: Bundle, folder: str, checkpoint: Path) -> float:
    """Largest difference in the logits, as a share of the largest logit."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return exports.error_of(logits_of(bundle.folder / folder), shapes.logits_of(model, IDS))


def matrices(folder: Path, rows: int) -> list[str]:
    """The types of the tensors that have a row, or a column, for each of `rows` tokens, no scales."""
    tensors = onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
    large = [tensor for tensor in tensors if rows in tensor.dims and len(tensor.dims) > 1]
    parts = ("scales", "zero_points", "scales.proposed", "zero_points.proposed", "cos_cache", "sin_cache")
    return sorted(TensorProto.DataType.Name(tensor.data_type) for tensor in large if not tensor.name.endswith(parts))


@pytest.fixture(scope="module")
def pair(convert: Any, tied: Path, untied: Path) -> tuple[Bundle, Any]:
    """int8 and int4, and what was told on the way."""
    made: tuple[Bundle, Any] = convert(tied, untied, format="onnx", draft_weights="int4")
    return made


@pytest.fixture(scope="module")
def exact(convert: Any, tied: Path, untied: Path) -> Bundle:
    made: Bundle = convert(tied, untied, format="onnx", weights="fp32", draft_weights="fp32")[0]
    return made


# What is in the files


def test_weights_are_those_of_the_torch_model_or_near(
    exact: Bundle, pair: tuple[Bundle, Any], tied: Path, untied: Path
) -> None:
    """A tied matrix is stored once there, too."""
    for bundle, main, draft in ((exact, 1e-5, 1e-5), (pair[0], 0.02, 0.25)):
        assert error_of(bundle, "main", tied) < main
        assert error_of(bundle, "draft", untied) < draft
    assert matrices(exact.folder / "main", 448) == ["FLOAT"]
    assert matrices(exact.folder / "draft", 512) == ["FLOAT", "FLOAT"]


def test_the_embedding_has_8_bits_and_is_stored_once_where_it_is_tied(pair: tuple[Bundle, Any]) -> None:
    folder = pair[0].folder
    assert matrices(folder / "main", 448) == ["UINT8"]
    assert matrices(folder / "draft", 512) == ["UINT8", "UINT8"]
    recipes = [entry.source.recipe for entry in (pair[0].manifest.main, pair[0].manifest.drafters[0].model)]
    assert [recipe["tied_embeddings"] for recipe in recipes] == ["true", "false"]


def test_the_data_file_holds_what_is_used_and_no_more(pair: tuple[Bundle, Any]) -> None:
    for name in ("main", "draft"):
        folder = pair[0].folder / name
        places = [
            {entry.key: entry.value for entry in tensor.external_data}
            for tensor in onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
            if tensor.external_data
        ]
        assert {place["location"] for place in places} == {"model.onnx.data"}
        size = (folder / "model.onnx.data").stat().st_size
        assert 0 <= size - sum(int(place["length"]) for place in places) < 64 * len(places)
        assert all(int(place["offset"]) % 64 == 0 for place in places)


def test_rows_can_be_chosen(pair: tuple[Bundle, Any]) -> None:
    """Two or more have the same bits, whichever they are."""
    for name in ("main", "draft"):
        folder = pair[0].folder / name
        whole = logits_of(folder)
        for rows in ((5, 7), (0, 31)):
            assert np.array_equal(logits_of(folder, rows), whole[slice(*rows)])
        assert len(logits_of(folder, (0, 1))) == 1


def test_rows_that_attention_alone_sees_change_nothing(pair: tuple[Bundle, Any]) -> None:
    for name in ("main", "draft"):
        assert np.array_equal(logits_of(pair[0].folder / name, extra=1), logits_of(pair[0].folder / name))


def test_blocks_may_be_wider_than_the_embedding(make_checkpoint: Any, convert: Any) -> None:
    """80 columns in blocks of 32; int4 with the tied matrix in 8 bits and with zero points."""
    narrow = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1}
    checkpoint = make_checkpoint("blocks", seed=5, **narrow)
    bundle, _ = convert(checkpoint, checkpoint, format="onnx")
    assert error_of(bundle, "main", checkpoint) < 0.02
    assert error_of(bundle, "draft", checkpoint) < 0.25
    for name in ("main", "draft"):
        assert matrices(bundle.folder / name, 448) == ["UINT8"]


def test_int4_has_4_bits_and_an_output_matrix_in_8(pair: tuple[Bundle, Any]) -> None:
    bits = {}
    for node in load(pair[0].folder / "draft" / "model.onnx").graph.node:
        if node.op_type == "MatMulNBits":
            bits[node.name] = {attribute.name: attribute.i for attribute in node.attribute}
    assert {(n["bits"], n["block_size"], n["accuracy_level"]) for n in bits.values()} == {(4, 32, 4), (8, 64, 4)}
    assert [name for name in bits if bits[name]["bits"] == 8] == ["lm_head/product"]


# The 8-bit format


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-6, 1.0, 1e4]))
def test_no_weight_is_off_by_more_than_a_step(rows: int, columns: int, seed: int, size: float) -> None:
    """Half a step, but for those of the largest's size and the other sign, which 8 bits just miss."""
    matrix = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * np.float32(size)
    values, scales = quantise(matrix)
    assert values.shape == (rows, -(-columns // 32), 32)
    back = (values.astype(np.float32) - 128) * scales[..., None]
    step = np.repeat(np.abs(scales), 32, axis=1)[:, :columns]
    off = np.abs(back.reshape(rows, -1)[:, :columns] - matrix)
    assert (off <= 1.001 * step).all()
    inside = back.reshape(rows, -1)[:, :columns] / np.where(step, step, 1)
    assert (off <= 0.501 * step)[np.abs(inside) < 126.5].all()


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 100), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-3, 1.0, 1e3]))
def test_4_bits_are_read_as_they_were_written(rows: int, columns: int, seed: int, size: float) -> None:
    """Some rows at a time, with zero points of an odd number of blocks, and to half a step."""
    matrix = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * np.float32(size)
    blocks = -(-columns // 32)
    shapes = {"weight": (rows, blocks, 16), "scales": (rows, blocks), "zero_points": (rows, -(-blocks // 2))}
    kinds = {"weight": np.uint8, "scales": np.float32, "zero_points": np.uint8}
    arrays: dict[str, Any] = {name: np.zeros(shape, kinds[name]) for name, shape in shapes.items()}
    packed = OnnxMatrix((rows, columns), 4, 32, arrays)
    for first in range(0, rows, 4):
        packed.put(slice(first, first + 4), StoredMatrix(matrix.shape, 0, matrix.__getitem__))
    node = helper.make_node("MatMulNBits", ["x", *arrays], ["y"], N=rows, K=columns, bits=4, block_size=32)
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    model = helper.make_model(helper.make_graph([node], "one", [], [], tensors))
    off = np.abs(dequantise(OnnxWeights(model, Path()), node) - matrix)
    assert (off <= 0.51 * np.repeat(arrays["scales"], 32, axis=1)[:, :columns]).all()


def test_blocks_of_q4_0_stay_as_they_are(make_checkpoint: Any, make_gguf: Any, convert: Any) -> None:
    checkpoint = make_checkpoint("keep", hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    path = make_gguf("keep-q4_0", checkpoint, quantisation="Q4_0")
    bundle, _ = convert(path, format="onnx", weights="int4")
    folder = bundle.folder / "main"
    weights, given = OnnxWeights(load(folder / "model.onnx"), folder), open_weights(path, is_gguf=True)
    nodes = {node.name.removesuffix("/product"): node for node in weights.model.graph.node}
    for name in ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"):
        assert np.array_equal(dequantise(weights, nodes[name]), given.matrix(name).read(slice(None)))


# Sources, formats, options


def test_gguf_files_are_converted_and_drafts_cut(make_checkpoint: Any, make_gguf: Any, convert: Any) -> None:
    checkpoint = make_checkpoint("keep", hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    path = make_gguf("keep", checkpoint, quantisation="Q8_0")
    bundle, progress = convert(path, path, format="onnx", draft_vocab=100)
    main, draft = bundle.manifest.main, bundle.manifest.drafters[0]
    assert (main.weights, draft.model.weights) == ("int8", "int8")
    assert main.source.recipe["route"] == "dequantise Q8_0"
    assert main.source.recipe["tied_embeddings"] == "true"
    assert error_of(bundle, "main", checkpoint) < 0.05
    assert progress.notes == ["draft vocabulary: 100 of 404 tokens."]
    assert (draft.num_proposed_tokens, draft.model.geometry.logits_width) == (100, 100)
    whole, cut = (logits_of(bundle.folder / name) for name in ("main", "draft"))
    assert cut.shape == (32, 100)
    assert np.allclose(
        cut, whole[:, bundle.read_proposed(bundle.manifest.drafters[0])], atol=0.05 * np.abs(whole).max()
    )
    assert matrices(bundle.folder / "draft", 100) == ["UINT8"]
    assert matrices(bundle.folder / "draft", 448) == ["UINT8"]
    bundle.check_hashes()


@pytest.mark.parametrize(("options", "message"), [
    ({"format": "onyx"}, "format='onyx' is not a model format. Did you mean 'onnx'"),
    ({"draft_format": "gguf"}, "draft_format='gguf' is not a model format"),
    ({"format": "onnx", "weights": "fp16"}, "weights='fp16' is not for ONNX: .* Choose int8, int4 or fp32"),
    ({"format": "onnx", "weights": "int9"}, "weights='int9' is not a weight format. Did you mean 'int8'"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(tied: Path, tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        export_bundle(tied, tied, output=tmp_path / "b", **options)
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_the_way_out_is_named(
    tied: Path, make_checkpoint: Any, make_gguf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_gguf("plain", make_checkpoint("plain"))
    monkeypatch.setattr("outrider_export.extras.is_installed", lambda package: package != "onnx")
    way_out = r'to ONNX needs onnx, which is not installed\. Run: pip install ".*\[onnx\]"'
    for source in (tied, file):
        with pytest.raises(ExportError, match=way_out):
            export_bundle(source, output=tmp_path / "b", format="onnx")
    with pytest.raises(ExportError, match=way_out):
        export_bundle(file, tied, output=tmp_path / "b", draft_format="onnx")
    assert list(tmp_path.iterdir()) == []


# What is converted


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("kind", "changes", "message"), [
    ("lfm2", {}, "has layers with a state that every token changes, which is"),
    ("mixtral", {}, "has mixtures of experts, which is not converted to ONNX. Leave out --format onnx"),
    ("gpt_neox", {}, "has the architecture 'gpt_neox', which is not converted to ONNX. Leave out --format onnx"),
    ("llama", {"head_dim": 24}, "rotates 24 numbers, ONNX Runtime a multiple of 16: leave out --format onnx"),
])  # fmt: skip
def test_what_onnxruntime_does_not_run_is_refused(tmp_path: Path, kind: str, changes: Any, message: str) -> None:
    folder = shapes.save_model(shapes.make_model(kind, **changes), tmp_path / "model")
    with pytest.raises(ExportError, match=message) as info:
        export_bundle(folder, output=tmp_path / "b", format="onnx")
    assert "\n" not in str(info.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}


BARE_YARN = {name: value for name, value in YARN.items() if "beta" not in name and name != "truncate"}


@pytest.mark.parametrize(
    ("kind", "rope"),
    [("llama", None), ("llama", LLAMA3), ("llama", LINEAR), ("qwen2", YARN), ("qwen2", BARE_YARN)],
)
def test_positions_are_scaled_as_torch_does(convert: Any, tmp_path: Path, kind: str, rope: Any) -> None:
    changes = {"rope_parameters": rope} if rope else {}
    changes |= {"use_sliding_window": False} if kind == "qwen2" else {}
    checkpoint = shapes.save_model(shapes.make_model(kind, **changes), tmp_path / kind)
    bundle, _ = convert(checkpoint, format="onnx", weights="fp32")
    assert error_of(bundle, "main", checkpoint) < 1e-4
