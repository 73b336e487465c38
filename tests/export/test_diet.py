"""The draft diet: the output matrix cut bit for bit, which tokens are kept, and bundles through the real converters."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino import opset13 as ops

import outrider
from exports import Recorder, check_answers, logits_of_ir
from outrider.bundle import read_bundle
from outrider.cli import run
from outrider.errors import ExportError, OptionError
from outrider.testing import save_toy_model
from outrider_export import export_bundle
from outrider_export.diet.diet import Diet, put_on_diet, read_corpus
from outrider_export.diet.output_matrix import cut_output

ROWS, COLUMNS, GROUP = 24, 12, 4
some_ids = st.lists(st.integers(0, ROWS - 1), min_size=1, unique=True).map(sorted)


def weights(kind: str) -> Any:
    """Weights [24, 12] (or [12, 24]) as they stand in an IR, dequantised by the graph."""
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    if kind == "f32":
        return ops.constant(matrix)
    if kind == "columns":
        return ops.constant(np.ascontiguousarray(matrix.T))
    if kind in ("f16", "bf16"):
        return ops.convert(ops.constant(matrix, dtype=getattr(ov.Type, kind)), "f32")
    bits, shape = (8, (ROWS, COLUMNS)) if kind[1:] == "8" else (4, (ROWS, COLUMNS // GROUP, GROUP))
    low, high = (0, 2**bits) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    element, scales = getattr(ov.Type, kind), (*shape[:-1], 1)
    values = ops.convert(ops.constant(rng.integers(low, high, shape), dtype=element), "f16")
    if kind[0] == "u":  # asymmetric
        zeros = ops.constant(rng.integers(low, high, scales), dtype=element)  # three groups: rows begin inside a byte
        values = ops.subtract(values, ops.convert(zeros, "f16"))
    values = ops.multiply(values, ops.constant((rng.standard_normal(scales) / high).astype(np.float16)))
    if bits == 4:
        values = ops.reshape(values, ops.constant(np.array([ROWS, COLUMNS], dtype=np.int64)), False)
    return ops.convert(values, "f32")


def model_of(kind: str, *, tied: bool = False, bias: bool = False) -> ov.Model:
    """Embedding, product with the output matrix, scale and soft cap."""
    matrix = weights(kind)
    token_ids = ops.parameter([-1, -1], np.int64, name="input_ids")
    token_ids.output(0).set_names({"input_ids"})
    table = matrix if tied else ops.constant(np.random.default_rng(2).standard_normal((ROWS, COLUMNS), np.float32))
    embedded = ops.gather(table, token_ids, ops.constant(np.int64(0)))
    logits = ops.matmul(ops.tanh(embedded), matrix, False, kind != "columns")
    if bias:
        logits = ops.add(logits, ops.constant(np.arange(ROWS, dtype=np.float32)[None, None]))
    logits = ops.tanh(ops.multiply(logits, ops.constant(np.float32(0.1))))
    logits.output(0).set_names({"logits"})
    return ov.Model([ops.result(logits)], [token_ids], "toy")


def run_model(model: ov.Model) -> Any:
    """float32 [24, width]: the logits after each token."""
    compiled = ov.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return np.array(compiled(np.arange(ROWS)[None])[0])[0]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "u8", "i8", "u4", "i4"])
@settings(max_examples=10)
@given(token_ids=some_ids)
def test_the_rows_left_are_the_same(kind: str, tied: bool, token_ids: list[int]) -> None:
    """For every token that is read, those whose rows are gone, too. One row alone goes through another kernel."""
    model = model_of(kind, tied=tied)
    whole = run_model(model)
    cut_output(model, np.array(token_ids, dtype=np.int32))
    assert np.allclose(run_model(model), whole[:, token_ids], rtol=0, atol=1e-6)


def test_the_rest_of_the_model_stays_as_it_was(tmp_path: Path) -> None:
    """Saved and read again: the constants but the output matrix are still there, which is smaller."""
    model = model_of("u8", tied=True)
    cut_output(model, np.array([1, 2], dtype=np.int32))
    ov.save_model(model, tmp_path / "cut.xml", compress_to_fp16=False)
    read = ov.Core().read_model(tmp_path / "cut.xml")
    kinds = [node.get_output_shape(0) for node in read.get_ops() if node.get_element_type() == ov.Type.u8]
    assert sorted(map(list, kinds)) == [[2, 1], [2, COLUMNS], [ROWS, 1], [ROWS, COLUMNS]]


def test_what_cannot_be_cut_is_refused() -> None:
    model = model_of("f32")
    matmul = model.output("logits").get_node().input_value(0).get_node().input_value(0).get_node().input_value(0)
    port = matmul.get_node().input(1)
    port.replace_source_output(ops.relu(port.get_source_output()).output(0))
    with pytest.raises(ExportError, match=r"goes through a Relu \[24, 12\], which cannot be cut .* --draft-vocab all"):
        cut_output(model, np.array([1], dtype=np.int32))
    x = ops.parameter([1, 1, 4], np.float32)
    relu = ops.relu(x)
    relu.output(0).set_names({"logits"})
    with pytest.raises(ExportError, match="logits are not made by a MatMul"):
        cut_output(ov.Model([ops.result(relu)], [x]), np.array([1], dtype=np.int32))


def logits(folder: Path) -> Any:
    """float32 [18, width] of the stateful IR in `folder`."""
    return logits_of_ir(folder / "openvino_model.xml", [*range(2, 20)])


def test_a_toy_decoder_is_cut(tmp_path: Path) -> None:
    """As `save_toy_bundle` does it."""
    for name, proposed in (("whole", None), ("expected", [2, 3, 17])):
        (tmp_path / name).mkdir()
        save_toy_model(tmp_path / name, vocab_size=20, padding=3, seed=4, proposed=proposed)
    put_on_diet("openvino", tmp_path / "whole", tmp_path / "cut", np.array([2, 3, 17], dtype=np.int32))
    assert np.array_equal(np.load(tmp_path / "cut" / "proposed.npy"), [2, 3, 17])
    assert np.array_equal(logits(tmp_path / "cut"), logits(tmp_path / "expected"))


# Which tokens


@given(st.data())
def test_without_a_corpus_the_lowest_ids_and_the_required_are_kept(data: st.DataObject) -> None:
    candidates = np.array(data.draw(some_ids), dtype=np.int32)
    required = np.array(
        sorted(data.draw(st.sets(st.sampled_from(candidates.tolist()), max_size=ROWS - 1))), dtype=np.int32
    )
    num_tokens = data.draw(st.integers(len(required) + 1, ROWS))
    chosen = Diet(num_tokens, candidates, required, [], ROWS).choose(None, Recorder())  # type: ignore[arg-type]
    others = [i for i in candidates if i not in required]
    assert chosen.dtype == np.int32
    assert chosen.tolist() == sorted([*required, *others[: num_tokens - len(required)]])


def test_a_corpus_is_read(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("one\ntwo\n" * 30_000, encoding="utf-8")
    pieces = read_corpus(path)
    assert "".join(pieces) == "one\ntwo\n" * 30_000
    assert len(pieces) == 3
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"prompt": "a", "text": "b"}\n\n{"turns": ["c", "d"]}\n', encoding="utf-8")
    assert read_corpus(path) == ["a", "b", "c", "d"]
    assert read_corpus(None) == []


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl", '{"text": "a"}\n{"txt": "b"}', r"a\.jsonl, line 2, has neither 'text' nor"),
    ("a.jsonl", '{"turns": [1]}', "line 1, has neither"),
    ("a.jsonl", "[1]", "line 1, has neither"),
    ("a.jsonl", "text", "line 1, has neither"),
    ("a.jsonl", "[" * 100_000 + "]" * 100_000, "line 1, has neither"),
    ("a.txt", " \n", "holds no text"),
    ("a.txt", b"\xff\xfe", "cannot be read"),
    ("a.txt", None, "cannot be read"),
    ("x" * 5000, None, "cannot be read"),
])  # fmt: skip
def test_what_is_no_corpus_is_refused(tmp_path: Path, name: str, content: Any, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OptionError, match=message):
        read_corpus(tmp_path / name)


# Bundles


KEPT: dict[str, Any] = {"weights": "keep", "draft_weights": "keep"}


@pytest.mark.slow
def test_a_kept_gguf_file_is_cut(gguf_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tied, with the weights that it has; special tokens and end tokens (400 and up) stay."""
    arguments = ["export", str(gguf_file), "--draft", str(gguf_file), "-o", str(tmp_path / "b")]
    kept = ["--weights", "keep", "--draft-weights", "keep"]
    assert run([*arguments, *kept, "--draft-vocab", "100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == ["draft vocabulary: 100 of 404 tokens."]
    bundle = read_bundle(tmp_path / "b")
    bundle.check_hashes()
    (drafter,) = bundle.manifest.drafters
    assert (drafter.vocabulary, drafter.num_proposed_tokens, drafter.model.geometry.logits_width) == ("same", 100, 100)
    assert drafter.model.weights == "Q8_0"
    token_ids = bundle.read_proposed(drafter)
    assert token_ids.tolist() == [*range(96), 400, 401, 402, 403]
    assert np.array_equal(logits(bundle.folder / "draft"), logits(bundle.folder / "main")[:, token_ids])
    check_answers(bundle.folder, "def quicksort")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.slow
def test_a_corpus_chooses(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("return items\n" * 20, encoding="utf-8")
    progress = Recorder()
    bundle = export_bundle(
        gguf_file,
        gguf_file,
        output=tmp_path / "b",
        draft_vocab=40,
        draft_vocab_corpus=tmp_path / "c.txt",
        progress=progress,
        **KEPT,
    )
    used = set(outrider.load(bundle.folder, drafter=None, cache_size=0.01).tokenizer.encode("return items\n"))
    assert max(used) > 40
    assert used < set(bundle.read_proposed(bundle.manifest.drafters[0]).tolist())
    assert progress.notes == ["draft vocabulary: 40 of 404 tokens; 100.0% of the corpus's tokens are among them."]


def test_only_shared_tokens_are_kept(
    make_checkpoint: Any, make_gguf: Any, build_tokenizer: Any, gguf_file: Path, tmp_path: Path
) -> None:
    tokenizer = build_tokenizer(special=("<|endoftext|>", "<|start|>", "<|im_end|>"))
    draft = make_gguf("diet-near", make_checkpoint("diet-near", tokenizer=tokenizer, seed=2))
    bundle = export_bundle(gguf_file, draft, output=tmp_path / "b", draft_vocab=403, **KEPT)
    (drafter,) = bundle.manifest.drafters
    assert drafter.vocabulary == "intersection"
    token_ids = bundle.read_proposed(drafter)
    assert token_ids.tolist() == np.flatnonzero(bundle.read_map(drafter) >= 0).tolist()
    assert 401 not in token_ids
    check_answers(bundle.folder, "def quicksort")


@pytest.mark.parametrize(("options", "message"), [
    ({"draft": None, "draft_vocab": 100}, "are for a draft model, and none is named"),
    ({"draft": None, "draft_vocab_corpus": "c.txt"}, "are for a draft model, and none is named"),
    ({"draft_vocab": -1}, "draft_vocab=-1 is not a number of tokens"),
    ({"draft_vocab": "most"}, "draft_vocab='most' is not a number of tokens"),
    ({"draft_vocab": 4}, "draft_vocab=4 leaves no room for text: 4 special tokens are always proposed"),
    ({"draft_vocab": "all", "draft_vocab_corpus": "c.txt"}, "leaves nothing to choose by a corpus"),
    ({"draft_vocab_corpus": "nowhere.txt"}, "nowhere.txt cannot be read"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(gguf_file: Path, tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        export_bundle(gguf_file, **({"draft": gguf_file} | options), output=tmp_path / "b")
    assert list(tmp_path.iterdir()) == []
