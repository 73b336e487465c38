"""int4 keeps the codes of 4 bits that a GGUF file has."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnxruntime
import openvino as ov
import pytest
from numpy.typing import NDArray

from outrider_export.direct.convert import convert
from outrider_export.direct.own_codes import GROUP, forms_of, keep, keep_minima, num_sums, own_codes
from outrider_export.direct.weights import StoredMatrix
from outrider_export.onnx.files import load
from outrider_export.onnx.graph import attribute_of
from outrider_export.progress import Silent
from outrider_export.sources.gguf_values import StoredBlocks
from tiny import SHAPE, random_q4_k, write_checkpoint, write_gguf

ROWS, COLUMNS = 64, 768
IDS = np.random.default_rng(4).integers(0, 400, (1, 24))


def weights_in(kind: str, columns: int = COLUMNS) -> NDArray[np.float32]:
    """A random matrix as a file in this quantisation gives it, float32 [64, columns]."""
    random = np.random.default_rng(0).normal(0, 0.1, (ROWS, columns)).astype(np.float32)
    quantisation = gguf.GGMLQuantizationType[kind]
    blocks = random_q4_k(random) if kind == "Q4_K" else gguf.quantize(random, quantisation)
    found: NDArray[np.float32] = gguf.dequantize(blocks, quantisation).astype(np.float32)
    return found


def back(codes: NDArray[np.uint8], zero_points: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """scale · (code − zero point), float32 [rows, columns]."""
    steps = codes.reshape(len(codes), -1, GROUP) - zero_points[..., None].astype(np.float32)
    found: NDArray[np.float32] = (steps * scales[..., None]).reshape(len(codes), -1)
    return found


@pytest.mark.parametrize(("kind", "has_minima"), [("Q4_0", False), ("Q4_1", True), ("Q4_K", True)])
def test_weights_keep_their_codes(kind: str, has_minima: bool) -> None:
    """With what is left over of minima as further columns; without them, 5 to 9 % are lost."""
    whole = weights_in(kind)
    form = forms_of({"model.layers.0.mlp.up_proj": stored(whole, 4.5)})["model.layers.0.mlp.up_proj"]
    assert (form.has_codes, form.has_minima, form.is_finer) == (True, has_minima, False)
    sums = num_sums(COLUMNS) if has_minima else 0
    assert sums in (0, 32)
    found = back(*keep(whole, sums))
    found = found[:, :COLUMNS] + (np.repeat(found[:, COLUMNS:][:, : COLUMNS // GROUP], GROUP, 1) if sums else 0)
    assert np.linalg.norm(found - whole) < 0.01 * np.linalg.norm(whole)
    assert (0.04 if has_minima else 0) <= np.linalg.norm(back(*keep(whole)) - whole) / np.linalg.norm(whole) < 0.1
    codes, scales, minima = keep_minima(whole)
    found = codes.reshape(ROWS, -1, GROUP) * scales[..., None] + minima[..., None]
    assert np.allclose(found.reshape(whole.shape), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["Q5_0", "Q8_0"])
def test_more_bits_are_no_codes_of_4(kind: str) -> None:
    whole = weights_in(kind)
    assert not forms_of({"model.layers.0.mlp.up_proj": stored(whole, 5.5)})["model.layers.0.mlp.up_proj"].has_codes
    assert np.linalg.norm(back(*keep(whole)) - whole) < 0.1 * np.linalg.norm(whole)  # rounded as others are


@pytest.mark.parametrize("scale", [0.25, -0.25, 0.0, np.nan])
def test_codes_in_a_file_are_those_of_their_values(scale: float) -> None:
    """Whatever codes a block has: all, from 1 to 15 with and without those between, each third, one."""
    rng = np.random.default_rng(3)
    kinds = [rng.integers(0, 16, GROUP), rng.integers(1, 16, GROUP), rng.integers(0, 2, GROUP) * 14 + 1]
    kinds += [rng.integers(0, 6, GROUP) * 3, rng.integers(3, 9, GROUP), np.full(GROUP, 7)]
    codes, scales = np.array(kinds, np.uint8), np.full((len(kinds), 1), scale, np.float32)
    stored = StoredBlocks([(codes, ())], (GROUP,), scales, scales * 5 - 0.1, len(kinds))
    found, expected = own_codes(stored), own_codes(stored.values())
    for field in dataclasses.fields(found):
        one, other = (getattr(each, field.name)[expected.known] for each in (found, expected))
        np.testing.assert_array_equal(one, other, err_msg=field.name)
    np.testing.assert_array_equal(found.known, expected.known)


def test_blocks_of_one_number_and_of_none() -> None:
    """What is all zeros has codes; what is no number has none, and hurts no other block."""
    blocks = np.zeros((4, GROUP), np.float32)
    blocks[1], blocks[2, 5] = 3.0, np.nan
    blocks[3] = np.arange(GROUP) % 16 * 0.25 - 1
    with np.errstate(all="ignore"):
        own = own_codes(blocks)
    assert own.known.tolist() == [True, False, False, True]
    assert np.array_equal(own.codes[3], np.arange(GROUP) % 16)
    assert (own.scales[3], own.zero_points[3], own.leftovers[3]) == (0.25, 4, 0)


def test_a_matrix_is_finer_if_most_of_the_file_has_4_to_6_bits() -> None:
    """Not in a file that is finer itself; embedding and output matrix are decided by themselves."""
    noise = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    bits = {"self_attn.q_proj": 4.5, "self_attn.v_proj": 6.5625, "mlp.up_proj": 5.5, "mlp.down_proj": 8.5}
    made = {f"model.layers.0.{name}": stored(noise, each) for name, each in bits.items()}
    made["lm_head"] = stored(noise, 8.5)
    finer = {name.rsplit(".", 1)[-1] for name, form in forms_of(made).items() if form.is_finer}
    assert finer == {"v_proj", "down_proj"}
    del made["model.layers.0.self_attn.q_proj"], made["model.layers.0.mlp.up_proj"]
    assert not any(form.is_finer for form in forms_of(made).values())


def test_a_matrix_is_finer_in_16_bits_too() -> None:
    """As slices of a file are written: most have codes of 4 bits there, and this one has not."""
    four = weights_in("Q4_K").astype(np.float16).astype(np.float32)
    made = {f"model.layers.0.mlp.{name}_proj": stored(four, 16) for name in ("gate", "up")}
    made["model.layers.0.mlp.down_proj"] = stored(weights_in("Q8_0"), 16)
    assert [form.is_finer for form in forms_of(made).values()] == [False, False, True]
    assert not any(form.is_finer for form in forms_of(made, keep_finer=False).values())


def stored(matrix: NDArray[np.float32], bits: float) -> StoredMatrix:
    return StoredMatrix(matrix.shape, int(matrix.size * bits / 8), lambda part: matrix[part])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in Q4_1 with an output matrix of its own, and down projections in Q8_0."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path_factory.mktemp("mixed")
    write_checkpoint(folder / "checkpoint")
    tensors = load_file(folder / "checkpoint" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    save_file(tensors, folder / "checkpoint" / "model.safetensors")
    write_gguf(folder / "mixed.gguf", folder / "checkpoint", "Q4_1", "qwen2", {}, finer="ffn_down")
    return folder / "mixed.gguf"


def converted(model: Path, library: str, weights: str, folder: Path, is_draft: bool = False) -> Path:
    output = folder / f"{library}-{weights}-{is_draft}"
    job: dict[str, Any] = {"model": str(model), "gguf": True, "format": library, "weights": weights}
    job |= {"output": str(output), "geometry": {"context_length": 64}, "is_draft": is_draft}
    convert(job, Silent())
    return output


def in_onnx(folder: Path, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    heads, size = SHAPE["num_key_value_heads"], SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
    empty = np.zeros((1, heads, 0, size), np.float32)
    inputs = {port.name: empty for port in session.get_inputs() if port.name.startswith("past_key_values")}
    inputs |= {"input_ids": token_ids, "attention_mask": np.ones_like(token_ids)}
    return np.array(session.run(["logits"], inputs)[0][0])


def in_openvino(folder: Path, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", config)
    count = token_ids.shape[1]
    inputs = {
        "input_ids": token_ids, "attention_mask": np.ones_like(token_ids), "position_ids": np.arange(count)[None],
        "beam_idx": np.zeros(1, np.int32),
    }  # fmt: skip
    return np.array(compiled.create_infer_request().infer(inputs)["logits"][0])


@pytest.mark.parametrize("library", ["onnx", "openvino"])
def test_int4_is_near_the_file(mixed: Path, tmp_path: Path, library: str) -> None:
    """Of weights that are rounded again, logits are off by 29 %. A row has the same bits with fewer other rows."""
    wanted = in_onnx(converted(mixed, "onnx", "fp32", tmp_path), IDS)
    read, folder = in_onnx if library == "onnx" else in_openvino, converted(mixed, library, "int4", tmp_path)
    found = read(folder, IDS)
    assert np.linalg.norm(found - wanted) < 0.03 * np.linalg.norm(wanted)
    assert np.array_equal(read(folder, IDS[:, :7]), found[:7])


@pytest.mark.parametrize("is_draft", [False, True])
def test_finer_matrices_are_in_8_bits(mixed: Path, tmp_path: Path, is_draft: bool) -> None:
    """But not of draft models, which have to be fast."""
    folder = converted(mixed, "onnx", "int4", tmp_path, is_draft)
    nodes = [node for node in load(folder / "model.onnx").graph.node if node.op_type == "MatMulNBits"]
    eight = [node.name.removesuffix("/product") for node in nodes if attribute_of(node, "bits") == 8]
    down = [] if is_draft else [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert eight == [*down, "lm_head"]
    ir = ov.Core().read_model(converted(mixed, "openvino", "int4", tmp_path, is_draft) / "openvino_model.xml")
    kinds = [node.get_element_type().get_type_name() for node in ir.get_ops() if node.get_type_name() == "Constant"]
    assert kinds.count("u8") == 2 * (2 + len(down))  # codes and zero points, of two matrices of tokens, too


def test_matrices_of_tokens_have_4_bits_in_onnx_where_the_file_has(mixed: Path, tmp_path: Path) -> None:
    """An embedding with its minima, which is only looked up; an output matrix if it has no minima."""
    path = tmp_path / "q4_0.gguf"
    write_gguf(path, mixed.parent / "checkpoint", "Q4_0", "qwen2", {})
    folders = {kind: converted(path, "onnx", kind, tmp_path) for kind in ("fp32", "int4")}
    wanted, found = (in_onnx(folder, IDS) for folder in folders.values())
    assert np.linalg.norm(found - wanted) < 0.03 * np.linalg.norm(wanted)
    graph = load(folders["int4"] / "model.onnx").graph
    assert {attribute_of(node, "bits") for node in graph.node if node.op_type == "MatMulNBits"} == {4}
    sizes = {each.name: tuple(each.dims) for each in graph.initializer}
    assert sizes["model.embed_tokens.weight"] == (SHAPE["vocab_size"], SHAPE["hidden_size"] // GROUP, GROUP // 2)
