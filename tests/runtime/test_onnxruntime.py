"""ONNX Runtime's backend. What all backends share is tested elsewhere."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import outrider
from calls import rows_of_call
from outrider.bundle import Bundle
from outrider.models.backends.onnxruntime import OnnxRuntime
from outrider.models.tuning.measure.readings import read
from outrider.testing import ToyTokenizer, save_toy_bundle, save_toy_model
from outrider.types import Chunk, Exactness, Rounding, RowRule

SMALL = outrider.Config().replace(cache_size=0.005)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_toy_model(folder, vocab_size=40, padding=8, format="onnx")
    return folder / "model.onnx"


def load(path: Path, **options: Any) -> OnnxRuntime:
    made = OnnxRuntime(path, vocab_size=40, **options)
    made.allocate(200)
    return made


def test_both_backends_calculate_the_same(model: Path, tmp_path: Path) -> None:
    from outrider.models.backends.openvino_paged import OpenVINOPaged

    save_toy_model(tmp_path, vocab_size=40, padding=8)
    other = OpenVINOPaged(tmp_path / "openvino_model.xml", vocab_size=40, precision="f32")
    other.allocate(200)
    token_ids = np.random.default_rng(0).integers(0, 39, 60).tolist()
    backend = load(model)
    theirs, ours = (read(each, token_ids, [60], 60) for each in (other, backend))
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert (backend.num_layers, backend.logits_width) == (other.num_layers, other.logits_width) == (2, 48)
    assert backend.bytes_per_token == other.bytes_per_token == 2 * 2 * 16 * 4


def test_sequences_run_one_after_another(model: Path) -> None:
    backend = load(model)
    assert not backend.capabilities.one_call
    texts = [[1, 2, 3, 4, 5], [7, 8, 9], [11] * 6]
    alone = [read(backend, text, [len(text)], len(text)) for text in texts]
    slots = [backend.open(10) for _ in texts]
    rows = rows_of_call(backend, *(Chunk(slot, text, n) for slot, text, n in zip(slots, texts, (2, 0, 1), strict=True)))
    np.testing.assert_array_equal(rows, [alone[0][3], alone[0][4], alone[2][5]])


def test_a_lack_of_memory_is_an_error_of_the_device(model: Path) -> None:
    backend = load(model)
    backend.allocate(10**15)
    with pytest.raises(outrider.DeviceError, match="no room for a cache of .* Lower max_new_tokens or cache_size"):
        backend.open(10**14)


NAMES = ("last_hidden_state", "hidden_states.0")


@pytest.fixture(scope="module")
def tapped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The model with what its output matrix reads, and the embeddings, as outputs; and the matrix, float32 [16, 48]."""
    proto = onnx.load(model)
    graph = proto.graph
    head = next(node for node in graph.node if node.output[0] == "logits")
    rows = next(node for node in graph.node if node.output[0] == head.input[0])
    embedding = next(node for node in graph.node if node.op_type == "Gather" and "input_ids" in node.input)
    old = dict(zip((rows.input[0], embedding.output[0]), NAMES, strict=True))
    for node in graph.node:
        for listed in (node.input, node.output):
            listed[:] = [old.get(name, name) for name in listed]
    graph.output.extend(onnx.helper.make_tensor_value_info(name, 1, ["batch", "length", 16]) for name in NAMES)
    path = tmp_path_factory.mktemp("tapped") / "model.onnx"
    onnx.save(proto, path)
    (matrix,) = (value for value in graph.initializer if value.name == head.input[1])
    return path, onnx.numpy_helper.to_array(matrix)


@pytest.mark.parametrize("in_background", [False, True])
def test_hidden_states_are_given_to_chunks_that_ask(tapped: tuple[Path, Any], in_background: bool) -> None:
    """Beside chunks that do not, in the same slot at other times, and after padding."""
    path, matrix = tapped
    backend = load(path, features=NAMES)
    assert backend.capabilities.features == NAMES
    backend.use(Exactness(rule=RowRule(Rounding(4))))
    backend.run_in_background(in_background)
    texts = [[1, 2, 3], [7, 8], [9, 4, 5, 6, 7]]
    for _ in range(2):  # the second time in buffers that were used before
        slots: list[Any] = [backend.open(20) for _ in texts]
        for wanted in (NAMES, NAMES[:1], ()):
            chunks = [Chunk(slot, text, len(text)) for slot, text in zip(slots, texts, strict=True)]
            chunks[0] = dataclasses.replace(chunks[0], features=wanted)
            chunks[2] = dataclasses.replace(chunks[2], features=wanted[::-1])
            step = backend.submit(chunks).wait()
            for chunk in (chunks[0], chunks[2]):
                if not wanted:
                    with pytest.raises(outrider.BundleError, match="Hidden states were asked for"):
                        step.features(chunk)
                    continue
                states = step.features(chunk)
                assert states.shape == (len(chunk.token_ids), 16 * len(wanted))
                begin = 16 * chunk.features.index(NAMES[0])
                rows = [row.full() for row in step.rows(chunk)]
                np.testing.assert_allclose(states[:, begin : begin + 16] @ matrix[:, :40], rows, atol=1e-4)
        for slot, text in zip(slots, texts, strict=True):
            slot.publish(text)
            slot.close()


def test_hidden_states_that_are_missing_are_named(model: Path) -> None:
    with pytest.raises(
        outrider.BundleError, match=r"needs the main model's hidden states 'last_hidden_state', which are"
    ):
        load(model, features=NAMES)


@pytest.mark.parametrize(
    ("device", "found"),
    [("XPU", "Found: CPU"), ("CUDA", "such as onnxruntime-gpu"), ("GPU.1", "no device 'GPU.1'"), ("CPU.1", "CPU.1")],
)
def test_devices_without_a_provider_are_named(model: Path, device: str, found: str) -> None:
    with pytest.raises(outrider.OptionError, match=found):
        load(model, device=device)


def without_rows(model: onnx.ModelProto) -> None:
    for name in ("rows_begin", "rows_end"):
        (port,) = (port for port in model.graph.input if port.name == name)
        (value,) = (value for value in model.graph.initializer if value.name == name)
        model.graph.input.remove(port)
        value.name = f"my_{name}"
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = f"my_{name}" if name.startswith("rows_") else name


def with_more_inputs(model: onnx.ModelProto) -> None:
    model.graph.input.append(onnx.helper.make_tensor_value_info("pixels", onnx.TensorProto.FLOAT, [1]))


def with_open_heads(model: onnx.ModelProto) -> None:
    for port in (*model.graph.input, *model.graph.output):
        if port.name.startswith(("past", "present")):
            port.type.tensor_type.shape.dim[3].dim_param = "head_size"


@pytest.mark.parametrize(("change", "message"), [
    (without_rows, "lacks rows_begin"),
    (with_more_inputs, "asks for pixels"),
    (with_open_heads, "leaves open how many heads"),
])  # fmt: skip
def test_other_graphs_are_refused(
    model: Path, tmp_path: Path, change: Callable[[onnx.ModelProto], None], message: str
) -> None:
    proto = onnx.load(model)
    change(proto)
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(outrider.BundleError, match=f"{message}.*Export it again"):
        load(tmp_path / "model.onnx")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(outrider.BundleError, match=r"model.onnx cannot be loaded by ONNX Runtime on CPU"):
        load(tmp_path / "model.onnx")


@pytest.mark.parametrize("option", ["precision", "cache_precision"])
def test_a_precision_is_not_dropped(model: Path, option: str) -> None:
    with pytest.raises(outrider.OptionError, match=f"{option}='bf16' is not what the ONNX model .* 'f32'. Use 'auto'"):
        load(model, **{option: "bf16"})
    assert load(model, **{option: "f32"}).precision == "f32"


def test_without_onnxruntime_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = save_toy_bundle(tmp_path / "b", formats=("onnx", "onnx"))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "outrider.models.backends.onnxruntime", raising=False)
    with pytest.raises(outrider.DeviceError, match=r'pip install ".*\[onnx\]"'):
        outrider.Engine(bundle, SMALL, tokenizer=ToyTokenizer())


class TestDraftBundle:
    """Drafts of another bundle's models."""

    @pytest.fixture
    def main(self, openvino_bundle: Bundle) -> Bundle:
        return openvino_bundle

    def test_its_draft_model_drafts(self, main: Bundle, tmp_path: Path) -> None:
        other = save_toy_bundle(tmp_path / "onnx", formats=("onnx", "onnx"))
        config = SMALL.replace(draft_bundle=str(other.folder))
        engine = outrider.Engine(main, config, tokenizer=ToyTokenizer())
        assert [where.rsplit(", ", 1)[1] for where in engine.setting.values()] == ["OpenVINO", "ONNX Runtime"]
        options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "num_assistant_tokens": 3}
        drafted = engine.generate("hello", drafter="draft", **options)
        assert drafted.stats.num_accepted_tokens > 0
        assert drafted.token_ids == engine.generate("hello", drafter=None, **options).token_ids

    def test_another_vocabulary_is_refused(self, main: Bundle, tmp_path: Path) -> None:
        other = save_toy_bundle(tmp_path / "other", vocab_size=30)
        with pytest.raises(outrider.BundleError, match="have different vocabularies"):
            outrider.Engine(main, SMALL.replace(draft_bundle=str(other.folder)), tokenizer=ToyTokenizer())
