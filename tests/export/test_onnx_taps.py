"""Main models in ONNX for drafters that read hidden states: outputs of them, and what such drafters share."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

import outrider
from exports import content
from heads import HEAD_SIZE, HEADS, HIDDEN, TOKENS, VOCAB, tensors_of, write_head
from onnx_runs import run_onnx
from outrider.bundle import Bundle
from outrider.bundle.hashes import list_files
from outrider.bundle.manifest import Geometry, write_manifest
from outrider.errors import ExportError
from outrider.testing import ToyTokenizer, save_toy_bundle
from outrider_export import export_bundle
from outrider_export.bundles.drafters import add_drafter
from outrider_export.heads import onnx_main
from outrider_export.heads.formats import EMBEDDING, MATRIX, HeadCheckpoint
from outrider_export.heads.onnx_main import add_outputs, hidden_states_of
from outrider_export.onnx.files import OnnxWeights, load
from outrider_export.onnx.inputs import add_extra_rows, add_rows
from outrider_export.onnx.matrices import dequantise
from toys import load_toy

# A random decoder in ONNX, in the form that onnxruntime-genai's model builder writes, without the builder.


def decoder(geometry: Geometry, seed: int = 0) -> Any:
    """The graph, an `onnx.ModelProto`, in float32."""
    rng = np.random.default_rng(seed)
    nodes: list[Any] = []
    tensors: list[Any] = []
    hidden, heads, size, width = (
        geometry.hidden_size, geometry.num_heads, geometry.head_size, geometry.logits_width
    )  # fmt: skip

    def tensor(name: str, values: Any) -> str:
        tensors.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def matrix(name: str, *shape: int) -> str:
        return tensor(name, (rng.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32))

    def node(kind: str, inputs: list[str], *outputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, outputs, outputs[0], **attributes))
        return outputs[0]

    def norm(name: str, root: str, skip: str, *more: str) -> str:
        gamma = tensor(f"{name}.weight", rng.uniform(0.5, 1.5, hidden).astype(np.float32))
        if not skip:
            return node("SimplifiedLayerNormalization", [root, gamma], name, axis=-1, epsilon=1e-6)
        kind, inputs = "SkipSimplifiedLayerNormalization", [root, skip, gamma]
        return node(kind, inputs, name, *more, domain="com.microsoft", epsilon=1e-6)

    one = tensor("one", np.array([1]))
    seen = node(
        "Cast", [node("Sub", [node("ReduceSum", ["attention_mask", one], "sum"), one], "past")], "seqlens", to=6
    )
    total = node("Cast", [node("Gather", [node("Shape", ["attention_mask"], "shape"), one], "length")], "total", to=6)
    stream = node(
        "Gather",
        [tensor("embedding", rng.standard_normal((width, hidden)).astype(np.float32)), "input_ids"],
        "embedded",
    )
    skip = ""
    for i in range(geometry.num_layers):
        rows = norm(f"{i}.input_norm", stream, skip, "", "", f"{i}.before")
        stream = f"{i}.before" if skip else stream
        packed = [node("MatMul", [rows, matrix(f"{i}.{n}.weight", hidden, heads * size)], f"{i}.{n}") for n in "qkv"]
        pasts, presents = (
            [f"{kind}.{i}.{half}" for half in ("key", "value")] for kind in ("past_key_values", "present")
        )
        read = node(
            "GroupQueryAttention", [*packed, *pasts, seen, total], f"{i}.read", *presents,
            domain="com.microsoft", num_heads=heads, kv_num_heads=heads,
        )  # fmt: skip
        attended = node("MatMul", [read, matrix(f"{i}.o.weight", heads * size, hidden)], f"{i}.attended")
        rows = norm(f"{i}.middle_norm", stream, attended, "", "", f"{i}.middle")
        wide = node(
            "Tanh", [node("MatMul", [rows, matrix(f"{i}.up.weight", hidden, 2 * hidden)], f"{i}.up")], f"{i}.wide"
        )
        stream, skip = (
            f"{i}.middle",
            node("MatMul", [wide, matrix(f"{i}.down.weight", 2 * hidden, hidden)], f"{i}.down"),
        )
    node("MatMul", [norm("final_norm", stream, skip), matrix("lm_head", hidden, width)], "logits")

    def port(name: str, kind: int, *shape: int | str) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    ints, floats = TensorProto.INT64, TensorProto.FLOAT
    caches = [f"{i}.{half}" for i in range(geometry.num_layers) for half in ("key", "value")]
    inputs = [port(name, ints, 1, name) for name in ("input_ids", "attention_mask")]
    inputs += [port(f"past_key_values.{name}", floats, 1, heads, "past", size) for name in caches]
    outputs = [port("logits", floats, 1, "n", width)]
    outputs += [port(f"present.{name}", floats, 1, heads, "all", size) for name in caches]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph(nodes, "decoder", inputs, outputs, tensors), opset_imports=opsets)
    model.ir_version = 10
    add_rows(model)
    add_extra_rows(model)
    return model


IDS = [*range(3, 27)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle whose main model has the builder's form, and the sizes of random heads."""
    folder = tmp_path_factory.mktemp("bundle") / "made"
    made = save_toy_bundle(folder, formats=("onnx", "onnx"), draft=False, vocab_size=TOKENS)
    geometry = Geometry("toy", 2, HEADS, HEADS, HEAD_SIZE, HIDDEN, 512, VOCAB)
    onnx.save(decoder(geometry), made.model_path(made.manifest.main))
    main = msgspec.structs.replace(made.manifest.main, geometry=geometry)
    write_manifest(folder, msgspec.structs.replace(made.manifest, main=main, files=list_files(folder)))
    return outrider.read_bundle(made.folder)


def tap(bundle: Bundle, names: list[str], to: Path) -> Path:
    """The main model with these hidden states as outputs."""
    folder, width = bundle.folder / "main", bundle.manifest.main.geometry.hidden_size
    shutil.copytree(folder, to)
    model = load(folder / "model.onnx")
    add_outputs(model, hidden_states_of(model), names[:1], width)
    add_outputs(model, hidden_states_of(model), names, width)  # what is there stays
    (to / "model.onnx").write_bytes(model.SerializeToString())
    return to / "model.onnx"


# Outputs of hidden states


def test_hidden_states_are_found_and_change_no_bits(toy: Bundle, tmp_path: Path) -> None:
    names = ["hidden_states.0", "hidden_states.1", "hidden_states.2", "last_hidden_state"]
    path = tap(toy, names, tmp_path / "tapped")
    first, _, third, last, logits = run_onnx(path, IDS, *names, "logits")
    np.testing.assert_array_equal(logits, run_onnx(toy.folder / "main" / "model.onnx", IDS)[0])
    weights = OnnxWeights(load(path), path.parent)
    np.testing.assert_array_equal(first, weights.read("embedding")[IDS])
    normed = third / np.sqrt((third**2).mean(-1, keepdims=True) + 1e-6) * weights.read("final_norm.weight")
    np.testing.assert_allclose(last, normed, atol=1e-5)
    np.testing.assert_allclose(logits, last @ weights.read("lm_head"), atol=1e-4)


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_hidden_states_of_a_converted_model_are_those_of_torch(
    tied: Path, convert: Any, tmp_path: Path, weights: str
) -> None:
    bundle = convert(tied, format="onnx", weights=weights)[0]
    names = ["hidden_states.0", "hidden_states.1", "last_hidden_state"]
    path = tap(bundle, names, tmp_path / "tapped")
    model = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    with torch.no_grad():
        known = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    *found, logits = run_onnx(path, IDS, *names, "logits")
    for here, there in zip(found, known, strict=True):
        assert np.abs(here - there[0].numpy()).max() < (1e-4 if weights == "fp32" else 0.02) * there.abs().max()
    np.testing.assert_array_equal(logits, run_onnx(bundle.folder / "main" / "model.onnx", IDS)[0])


def test_another_form_is_refused_and_the_bundle_stays(tmp_path: Path) -> None:
    bundle = save_toy_bundle(tmp_path / "toy", formats=("onnx", "onnx"), draft=False)
    before = content(bundle.folder)
    hidden = bundle.manifest.main.geometry.hidden_size
    head = write_head(tmp_path / "head", "eagle3", tensors_of("eagle3", hidden=hidden), hidden_size=hidden)
    with pytest.raises(
        ExportError, match="'hidden_states.0', and the main model's graph has none in a form that is known"
    ):
        add_drafter(bundle.folder, head)
    assert content(bundle.folder) == before
    assert {path.name for path in tmp_path.iterdir()} == {"toy", "head"}


# Drafters


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_drafts_change_no_text(toy: Bundle, tmp_path: Path, kind: str) -> None:
    shutil.copytree(toy.folder, tmp_path / "bundle")
    linked = tmp_path / "before.onnx"
    linked.hardlink_to(tmp_path / "bundle" / "main" / "model.onnx")
    before = linked.read_bytes()
    tensors = tensors_of(kind)
    if kind == "dflash":
        tensors["lm_head.weight"] = np.random.default_rng(2).standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    head = write_head(tmp_path / "head", kind, tensors)
    made = add_drafter(tmp_path / "bundle", head, weights="fp32")
    made.check_hashes()
    assert linked.read_bytes() == before
    engine = load_toy(made, tokenizer=ToyTokenizer([b"a"] * TOKENS))
    assert engine.main.capabilities.features == made.manifest.drafters[0].features
    several: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 5}]
    for options in several:
        options |= {"max_new_tokens": 60, "num_assistant_tokens": 3}
        answers = [engine.generate([7, 8, 9] * 2, drafter=name, **options) for name in (None, kind)]
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[1].stats.num_draft_tokens > 0


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_drafters_share_the_matrices_of_a_converted_model(tied: Path, convert: Any, tmp_path: Path, kind: str) -> None:
    """A tied matrix in 8 bits; the drafter's own is cut."""
    shutil.copytree(convert(tied, format="onnx")[0].folder, tmp_path / "bundle")
    tensors = {
        name: values for name, values in tensors_of(kind).items() if name not in ("lm_head.weight", "d2t", "t2d")
    }
    head = write_head(tmp_path / "head", kind, tensors)
    made = add_drafter(tmp_path / "bundle", head, draft_vocab=300)
    assert made.manifest.drafters[0].num_proposed_tokens == 300
    engine = outrider.Engine(made, outrider.Config().replace(cache_size=0.01))
    options: dict[str, Any] = {"max_new_tokens": 20, "num_assistant_tokens": 3}
    answers = [engine.generate("The quick brown fox", drafter=name, **options) for name in (None, kind)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].stats.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["openvino", "onnx"])
def test_an_export_takes_a_drafter_without_pytorch(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    monkeypatch.setattr("outrider_export.extras.is_installed", lambda package: package in ("onnx", "onnxruntime"))
    head = write_head(tmp_path / "head", "mtp")
    bundle = export_bundle(tied, head, output=tmp_path / "bundle", format=form)
    assert bundle.manifest.drafters[0].kind == "mtp"
    bundle.check_hashes()  # of the main model with its hidden states


# Matrices


def head_of(kind: str) -> HeadCheckpoint:
    return HeadCheckpoint(kind, ("last_hidden_state",), {}, 1, 2, 2, 8, 16, 99)


def test_what_a_drafter_lacks_is_read_from_the_main_model(toy: Bundle, tmp_path: Path) -> None:
    shutil.copytree(toy.folder / "main", tmp_path / "main")
    path, geometry = tmp_path / "main" / "model.onnx", toy.manifest.main.geometry
    weights = OnnxWeights(load(path), path.parent)
    embedding, matrix = weights.read("embedding"), weights.read("lm_head").T
    token_ids = np.array([0, 3, 7], dtype=np.int32)
    made = onnx_main.share(path, geometry, head_of("mtp"), None)
    np.testing.assert_array_equal(made[EMBEDDING], embedding)
    np.testing.assert_array_equal(made[MATRIX], matrix)
    made = onnx_main.share(path, geometry, head_of("mtp"), token_ids)
    np.testing.assert_array_equal(made[MATRIX], matrix[token_ids])


def test_matrices_of_an_imported_model_are_read(tied: Path, build_genai: Any, tmp_path: Path) -> None:
    """The builder's own 4 bits: the embedding is in a GatherBlockQuantized, and the output matrix in a MatMulNBits."""
    folder = shutil.copytree(build_genai(tied, "int4"), tmp_path / "int4")
    geometry = Geometry("qwen2", 2, 4, 2, 16, 64, 512, 448)
    made = onnx_main.share(folder / "model.onnx", geometry, head_of("mtp"), None)
    known = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    for name in (EMBEDDING, MATRIX):
        assert np.abs(made[name] - known).max() < 0.1 * np.abs(known).max()
    assert "last_hidden_state" in [value.name for value in load(folder / "model.onnx").graph.output]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_matrices_are_read_as_onnxruntime_does(tmp_path: Path, bits: int, has_zeros: bool) -> None:
    """The product with a unit matrix is the matrix. 80 columns are two blocks and a half."""
    rng = np.random.default_rng(bits)
    count, columns, block = 6, 80, 32
    shapes = {"codes": (count, 3, block * bits // 8), "zeros": (count * (-(-3 * bits // 8)),)}
    values = {name: rng.integers(0, 256, shape).astype(np.uint8) for name, shape in shapes.items()}
    values["scales"] = rng.standard_normal(count * 3).astype(np.float32)
    names = ["codes", "scales", *(["zeros"] if has_zeros else [])]
    attributes = {"K": columns, "N": count, "bits": bits, "block_size": block}
    node = helper.make_node("MatMulNBits", ["x", *names], ["y"], domain="com.microsoft", **attributes)
    ports = [helper.make_tensor_value_info(name, 1, [None, n]) for name, n in (("x", columns), ("y", count))]
    tensors = [numpy_helper.from_array(values[name], name) for name in names]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", ports[:1], ports[1:], tensors), opset_imports=opsets)
    model.ir_version = 10
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    known = session.run(None, {"x": np.eye(columns, dtype=np.float32)})[0].T
    rows = np.array([1, 4], dtype=np.int32)
    weights = OnnxWeights(model, tmp_path)
    np.testing.assert_allclose(dequantise(weights, node), known, atol=1e-5)
    np.testing.assert_allclose(dequantise(weights, node, rows), known[rows], atol=1e-5)
