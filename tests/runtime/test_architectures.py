"""Models of other shapes: what is refused at load."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

import outrider
from outrider.bundle import Bundle, read_bundle, write_manifest
from outrider.bundle.architectures import PEERS, REFUSED, refusal_of
from outrider.errors import BundleError
from outrider.models.backends.attention import check_windows, windows_of
from outrider.models.backends.paged_graph import read_decoder
from outrider.models.backends.registry import compile_model
from outrider.models.cost.measure import CallTimes
from outrider.models.cost.table import MAIN_ROWS
from outrider.models.tuning.measure.overlap import measure_contention
from outrider.models.tuning.model_spec import ModelSpec
from outrider.testing import FakeBackend, ToyTokenizer, save_toy_bundle
from outrider.testing.weights import LAYERS
from outrider.types import Chunk


def with_geometry(folder: Path, **changes: Any) -> Bundle:
    """A toy bundle whose main model has another geometry in its manifest."""
    bundle = save_toy_bundle(folder, draft=False)
    main = bundle.manifest.main
    main = msgspec.structs.replace(main, geometry=msgspec.structs.replace(main.geometry, **changes))
    (folder / "outrider.json").unlink()
    write_manifest(folder, msgspec.structs.replace(bundle.manifest, main=main))
    return read_bundle(folder)


# Refused


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_architecture_the_rule_and_the_next_step(name: str) -> None:
    said = refusal_of(name)
    assert said is not None
    assert f"'{name}'" in said
    assert REFUSED[name] in said
    assert f"Run it with {PEERS[name]}, or choose a model of the table in docs/models.md" in said


def test_layers_decide_where_the_name_does_not() -> None:
    assert refusal_of("qwen3") is refusal_of("granitemoehybrid") is None
    assert refusal_of("granitemoehybrid", ["attention"] * 3) is None
    assert refusal_of("lfm2", ["conv", "full_attention"]) is None
    assert refusal_of("gemma3_text", ["sliding_attention", "full_attention"]) is None
    assert refusal_of("granitemoehybrid", ["attention", "mamba"]) is None
    assert refusal_of("qwen3_5_text", ["full_attention", "linear_attention"]) is None
    assert "its layer_types have 'recurrent', and known are" in str(refusal_of("new", ["full_attention", "recurrent"]))
    assert "chunks" in str(refusal_of("new", ["chunked_attention"]))
    assert refusal_of("llama4_text", ["chunked_attention", "full_attention"]) is None
    assert refusal_of("nemotron_h", ["mamba", "mlp", "attention", "moe"]) is None


def test_a_state_space_model_is_refused_at_load(tmp_path: Path) -> None:
    bundle = with_geometry(tmp_path / "toy", architecture="mamba")
    with pytest.raises(
        BundleError, match=r"'mamba' is not supported: its layers keep a state .* Run it with llama\.cpp, or"
    ):
        outrider.Engine(bundle, tokenizer=ToyTokenizer())


def add_state(path: Path, shape: Sequence[int]) -> None:
    """Add a state to an IR, which is added to its logits."""
    model = ov.Core().read_model(path)
    start = ops.constant(np.zeros([max(size, 1) for size in shape], np.float32))
    state = ov.opset6.read_value(start, "cache_params.past.ssm.0", ov.Type.f32, ov.PartialShape(list(shape)))
    kept = ov.opset6.assign(ops.multiply(state, ops.constant(np.float32(0.5))), "cache_params.past.ssm.0")
    result = model.output("logits").get_node()
    total = ops.add(result.input_value(0), ops.reduce_sum(state, ops.constant(list(range(len(shape)))), False))
    total.output(0).set_names({"logits"})
    result.input(0).replace_source_output(total.output(0))
    made = ov.Model(model.get_results(), [*model.get_sinks(), kept], model.get_parameters(), "with a state")
    ov.save_model(made, path.with_name("new.xml"), compress_to_fp16=False)


@pytest.mark.parametrize("shape", [(1, 8, 4), (-1, 4, 8, 16)], ids=["convolution", "state space"])
def test_a_graph_with_another_state_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    bundle = save_toy_bundle(tmp_path / "toy", draft=False)
    path = bundle.model_path(bundle.manifest.main)
    add_state(path, shape)
    with pytest.raises(BundleError, match=r"keeps a state .*ssm.* besides keys and values, .* docs/models\.md"):
        read_decoder(ov.Core(), path.with_name("new.xml"))


# Sliding windows


def test_a_graph_without_the_manifest_s_windows_is_refused(tmp_path: Path) -> None:
    windows = (16,) + (0,) * (LAYERS - 1)
    bundle = with_geometry(tmp_path / "toy", sliding_windows=windows)
    with pytest.raises(BundleError, match=rf"windows of 16 tokens \(1 of {LAYERS} layers\), .* has no limit: OpenVINO"):
        outrider.Engine(bundle, tokenizer=ToyTokenizer())


def test_a_window_is_read_from_what_openvino_makes_of_it(tmp_path: Path) -> None:
    bundle = save_toy_bundle(tmp_path / "toy", draft=False)
    model = read_decoder(ov.Core(), bundle.model_path(bundle.manifest.main))
    node = next(node for node in model.get_ordered_ops() if node.get_type_name() == "PagedAttentionExtension")
    minus = ops.convert(ops.squeeze(ops.constant(np.full((1, 1, 1, 1), -4096)), ops.constant([0, 1, 2, 3])), "i32")
    node.input(10).replace_source_output(ops.multiply(minus, ops.constant(np.int32(-1))).output(0))
    assert windows_of(model) == (4096,) + (0,) * (LAYERS - 1)
    node.input(10).replace_source_output(ops.parameter([], np.int32).output(0))
    assert windows_of(model)[0] < 0
    with pytest.raises(BundleError, match=r"has unknown tokens"):
        check_windows(model, (0,) * LAYERS)


def test_windows_are_refused_in_onnx(tmp_path: Path) -> None:
    bundle = with_geometry(tmp_path / "toy", sliding_windows=(16,) * LAYERS)
    main = msgspec.structs.replace(bundle.manifest.main, format="onnx")
    with pytest.raises(
        BundleError, match=r"sliding windows of 16 tokens \(2 of 2 layers\), for which ONNX Runtime needs"
    ):
        compile_model(ModelSpec("main", bundle, main))


class RecordingBackend(FakeBackend):
    """Keeps the tokens of all calls."""

    def __init__(self) -> None:
        super().__init__(500)
        self.read: list[list[int]] = []

    def submit(self, chunks: Sequence[Chunk]) -> Any:
        self.read += [[*chunk.token_ids] for chunk in chunks]
        return super().submit(chunks)


def test_costs_are_measured_with_tokens_that_differ() -> None:
    """Equal tokens would activate the same experts, and a target pass would seem to cost what plain decoding does."""
    backend = RecordingBackend()
    CallTimes(backend, MAIN_ROWS).measure()
    assert {len(tokens) for tokens in backend.read} == {*MAIN_ROWS}
    longest = max(backend.read, key=len)
    for tokens in backend.read:
        assert tokens == longest[: len(tokens)]  # a call of more rows never activates fewer
        assert len({*tokens}) > 0.8 * len(tokens)


def test_calls_beside_others_have_tokens_that_differ() -> None:
    class Background(RecordingBackend):
        def run_in_background(self, wanted: bool) -> None:
            pass

    main: Any = Background()
    measure_contention(main, RecordingBackend())
    assert all(len({*tokens}) == 4 for tokens in main.read)
