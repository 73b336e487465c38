"""What the writer for GPUs writes is what the writer for OpenVINO does. Here it runs on the CPU, in float32."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from answering import HIDDEN_SIZE, NUM_LAYERS, PROMPTS, make_bundle
from outrider.bundle import Bundle
from outrider.config import DeviceConfig
from outrider.errors import DeviceError, ExportError
from outrider.models.backends.taps import LAST
from outrider_distill import gpu_writer
from outrider_distill.answers import write_data
from outrider_distill.data import Data, find_shards, tap_names
from outrider_distill.gpu_writer import GpuWriter, gpu_speed, open_writer
from outrider_distill.prompts import DistillPrompt
from outrider_distill.recipe import Recipe
from outrider_distill.texts import DistillText, WritingTask
from outrider_distill.torch_main import TorchMain
from outrider_distill.train.fit import _tokens_in_batch
from outrider_distill.writer import Writer

MOST = 40
FEATURES = (*tap_names(NUM_LAYERS), LAST)
PRECISE = DeviceConfig(properties={"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"})  # as PyTorch calculates
CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tmp_path_factory.mktemp("answering"))[0]


@pytest.fixture(scope="module")
def writer(bundle: Bundle) -> GpuWriter:
    return GpuWriter(bundle, features=FEATURES, max_new_tokens=MOST, batch_size=5, **CPU)


@pytest.fixture(scope="module")
def tasks(writer: GpuWriter) -> list[WritingTask]:
    """Every second one is sampled."""
    return [WritingTask(i, writer.tokenizer.encode_prompt(PROMPTS[i * 20]), 0.7 * (i % 2)) for i in range(8)]


@pytest.fixture(scope="module")
def expected(bundle: Bundle, tasks: list[WritingTask]) -> dict[int, DistillText]:
    """What the writer for OpenVINO writes."""
    right = Writer(bundle, features=FEATURES, max_new_tokens=MOST, batch_size=3, device=PRECISE)
    return {text.number: text for text in right.write(tasks, seed=5)}


@pytest.mark.slow
def test_texts_are_those_of_the_other_writer(
    writer: GpuWriter, tasks: list[WritingTask], expected: dict[int, DistillText]
) -> None:
    """Greedy and sampled ones, in batches of five and three, with all that is stored of them."""
    told: list[int] = []
    texts = list(writer.write(tasks, seed=5, watch=told.append))
    assert [text.number for text in texts] == [task.number for task in tasks]
    assert sum(told) == sum(len(text.token_ids) - text.num_prompt_tokens for text in texts)
    for text in texts:
        right = expected[text.number]
        assert text.token_ids.tolist() == right.token_ids.tolist()
        assert (text.num_prompt_tokens, text.reason) == (right.num_prompt_tokens, right.reason)
        assert text.features is not None
        assert right.features is not None
        assert text.features.shape == (len(text.token_ids), len(FEATURES) * HIDDEN_SIZE)
        np.testing.assert_allclose(text.features, right.features, atol=2e-3 * np.abs(right.features).max())
        np.testing.assert_allclose(text.top_probs, right.top_probs, atol=2e-3)
        surest = right.top_probs[:, 0] > right.top_probs[:, 1] + 5e-3  # of others the order may differ
        assert (text.top_ids[surest, 0] == right.top_ids[surest, 0]).all()
        assert (text.top_ids[: text.num_prompt_tokens - 1] == -1).all()
        assert (text.top_ids[-1] == -1).all()
        assert ((text.top_ids >= 0) == (text.top_probs > 0)).all()


def test_a_batch_that_is_used_again_forgets_the_texts_before(
    writer: GpuWriter, tasks: list[WritingTask], expected: dict[int, DistillText]
) -> None:
    for chosen in (tasks[3:], tasks[:5], tasks[2:4]):
        for text in writer.write(chosen, seed=5):
            assert text.token_ids.tolist() == expected[text.number].token_ids.tolist()


def test_texts_end_at_the_tokens_that_are_given(
    writer: GpuWriter, tasks: list[WritingTask], expected: dict[int, DistillText]
) -> None:
    ends = {int(expected[0].token_ids[expected[0].num_prompt_tokens + 3])}
    (text,) = writer.write(tasks[:1], seed=5, stop=ends)
    assert text.reason == "stop"
    assert len(text.token_ids) == text.num_prompt_tokens + 4 or text.token_ids[-1] in ends
    (text,) = writer.write(tasks[:1], seed=5, max_new_tokens=2, stop=())
    assert (len(text.token_ids), text.reason) == (text.num_prompt_tokens + 2, "length")


@pytest.mark.slow
def test_texts_without_hidden_states_are_the_same(
    bundle: Bundle, tasks: list[WritingTask], expected: dict[int, DistillText], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch of which three prompts are read at a time."""
    monkeypatch.setattr(gpu_writer, "_READ_ROWS", 3)
    plain = GpuWriter(bundle, max_new_tokens=MOST, **CPU)
    assert plain.batch_size == 8
    for text in plain.write(tasks, seed=5):
        assert text.features is None
        assert text.token_ids.tolist() == expected[text.number].token_ids.tolist()


def test_prompts_that_do_not_fit_are_refused(writer: GpuWriter, bundle: Bundle) -> None:
    for token_ids in ([], [1] * (writer.max_prompt_tokens + 1)):
        with pytest.raises(ExportError, match="prompt of text 7 has"):
            list(writer.write([WritingTask(7, token_ids)], seed=0))
    with pytest.raises(ExportError, match="leaves no room"):
        GpuWriter(bundle, max_new_tokens=8192, **CPU)


def test_logits_that_are_not_finite_are_an_error(bundle: Bundle, tasks: list[WritingTask]) -> None:
    broken = GpuWriter(bundle, max_new_tokens=4, batch_size=2, **CPU)
    broken._main._norm.fill_(torch.nan)
    with pytest.raises(DeviceError, match="not finite"):
        list(broken.write(tasks[:1], seed=0))


@pytest.mark.slow
def test_too_little_memory_is_an_error(
    bundle: Bundle, tasks: list[WritingTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TorchMain, "new_cache", full)
    with pytest.raises(DeviceError, match="no room for 2 texts at a time.*CUDA_VISIBLE_DEVICES"):
        list(GpuWriter(bundle, max_new_tokens=4, batch_size=2, **CPU).write(tasks[:1], seed=0))


@pytest.mark.slow
def test_another_model_does_not_agree(bundle: Bundle) -> None:
    """As one whose layers are of another kind than Llama's would."""
    made = GpuWriter(bundle, max_new_tokens=4, batch_size=1, **CPU)
    assert made.agrees(bundle)
    made._main._layers[1]["bias"] = None
    assert not made.agrees(bundle)


@pytest.mark.slow
def test_without_a_gpu_openvino_writes(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(open_writer(bundle, max_new_tokens=4, batch_size=1), Writer)
    assert gpu_speed(bundle) is None


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is the CPU, which knows no graphs."""

    def on_cpu(given: Bundle, **options: Any) -> GpuWriter:
        return GpuWriter(given, **options, **CPU)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_writer, "GpuWriter", on_cpu)
    monkeypatch.setattr(gpu_writer, "_TIMED_ANSWER", 3)


@pytest.mark.slow
@pytest.mark.usefixtures("with_gpu")
def test_a_gpu_writes_where_the_model_is_the_same(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_writer(bundle, max_new_tokens=4, batch_size=2), GpuWriter)
    assert isinstance(open_writer(bundle, max_new_tokens=4, batch_size=1, device=DeviceConfig()), Writer)
    assert (gpu_speed(bundle) or 0) > 0
    monkeypatch.setattr(GpuWriter, "agrees", lambda *_: False)
    assert isinstance(open_writer(bundle, max_new_tokens=4, batch_size=1), Writer)
    assert gpu_speed(bundle) is None


@pytest.mark.parametrize(("memory", "times"), [(6e9, 1), (24e9, 3), (80e9, 8)])
def test_training_takes_larger_batches_on_a_gpu(monkeypatch: pytest.MonkeyPatch, memory: float, times: int) -> None:
    usual = _tokens_in_batch("eagle3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=int(memory)))
    assert _tokens_in_batch("eagle3") == times * usual


@pytest.mark.slow
@pytest.mark.usefixtures("with_gpu")
def test_training_data_is_the_same(bundle: Bundle, tmp_path: Path) -> None:
    """With prompts of the model's own, follow-ups, and a second shard. In f32 on both sides."""
    recipe = Recipe(1600, frozenset({"taps"}), seed=3, max_new_tokens=20)
    prompts = [DistillPrompt(each) for each in PROMPTS]
    for name, device in (("gpu", None), ("openvino", PRECISE)):
        write_data(tmp_path / name, bundle, recipe, prompts=prompts, batch_size=8, device=device)
    shards, others = (find_shards(tmp_path / name) for name in ("gpu", "openvino"))
    assert len(shards) == len(others) > 1
    for one, other in zip(shards, others, strict=True):
        assert (one / "prompts.jsonl").read_bytes() == (other / "prompts.jsonl").read_bytes()
        for name in ("tokens", "answer", "starts", "greedy"):
            np.testing.assert_array_equal(np.load(one / f"{name}.npy"), np.load(other / f"{name}.npy"))
    assert Data(tmp_path / "gpu").num_answer_tokens >= 1600
