"""Texts that the writer writes are the main model's, and so is all that is stored of them."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import outrider
from answering import HIDDEN_SIZE, NUM_LAYERS, PROMPTS, make_bundle
from outrider.bundle import Bundle
from outrider.config import DeviceConfig
from outrider.errors import DeviceError, ExportError
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.taps import LAST
from outrider_distill import writer as writer_module
from outrider_distill.data import tap_names
from outrider_distill.texts import NUM_KEPT, DistillText, WritingTask, draw, is_loop, likeliest, near_best
from outrider_distill.writer import Writer, _fastest

MOST = 40
FEATURES = (*tap_names(NUM_LAYERS), LAST)
PRECISE = DeviceConfig(properties={"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"})  # as PyTorch calculates


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Any]:
    return make_bundle(tmp_path_factory.mktemp("answering"))


@pytest.fixture(scope="module")
def writer(both: tuple[Bundle, Any]) -> Writer:
    return Writer(both[0], features=FEATURES, max_new_tokens=MOST, batch_size=3, device=PRECISE)


@pytest.fixture(scope="module")
def tasks(writer: Writer) -> list[WritingTask]:
    """Every second one is sampled."""
    return [WritingTask(i, writer.tokenizer.encode_prompt(PROMPTS[i * 20]), 0.7 * (i % 2)) for i in range(8)]


@pytest.fixture(scope="module")
def texts(writer: Writer, tasks: list[WritingTask]) -> dict[int, DistillText]:
    return {text.number: text for text in writer.write(tasks, seed=5)}


@pytest.fixture(scope="module")
def expected(both: tuple[Bundle, Any], texts: dict[int, DistillText]) -> dict[int, Any]:
    """What the model in PyTorch calculates for each text: logits, and hidden states by layer."""
    found = {}
    for number, text in texts.items():
        with torch.no_grad():
            out = both[1](torch.tensor(text.token_ids.astype(np.int64))[None], output_hidden_states=True)
        found[number] = out
    return found


@pytest.mark.slow
def test_greedy_answers_are_the_engines(
    both: tuple[Bundle, Any], tasks: list[WritingTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, with prompts in pieces. In f32, where no bit depends on the rest of a batch."""
    monkeypatch.setattr(writer_module, "PROMPT_TOKENS", 7)
    engine = outrider.Engine(both[0], outrider.Config().replace(cache_size=0.02))
    assert "f32" in engine.setting["main_device"]
    with engine:
        right = {
            task.number: engine.generate(task.token_ids, max_new_tokens=MOST, drafter=None).token_ids for task in tasks
        }
    writer = Writer(both[0], max_new_tokens=MOST, batch_size=3)
    made = list(writer.write([WritingTask(task.number, task.token_ids) for task in tasks], seed=0))
    assert {text.number: text.token_ids[text.num_prompt_tokens :].tolist() for text in made} == right
    assert len({tuple(each) for each in right.values()}) > 2
    assert {text.reason for text in made} == {"stop" if right[t.number][-1] in (400, 402) else "length" for t in made}
    assert all(text.features is None for text in made)


def test_batches_stay_full_and_prompts_come_in_the_same_calls(
    writer: Writer, tasks: list[WritingTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[int]] = []
    batches: list[int] = []
    submit, call = writer._backend.submit, writer._call

    def counted(running: Any, ends: Any) -> int:
        batches.append(len(running))
        return call(running, ends)

    def watched(chunks: Any) -> Any:
        calls.append([len(chunk.token_ids) for chunk in chunks])
        return submit(chunks)

    monkeypatch.setattr(writer_module, "PROMPT_TOKENS", 16)
    monkeypatch.setattr(writer._backend, "submit", watched)
    monkeypatch.setattr(writer, "_call", counted)
    told: list[int] = []
    texts = list(writer.write(tasks, seed=5, watch=told.append))
    assert sum(told) == sum(len(text.token_ids) - text.num_prompt_tokens for text in texts)
    assert sum(map(sum, calls)) == sum(len(text.token_ids) for text in texts)  # each token is read once
    assert max(map(max, calls)) <= 16
    assert batches == sorted(batches, reverse=True)  # none is left until there is nothing to replace it
    assert batches[0] == 3
    assert any(1 in call and max(call) > 1 for call in calls)  # answers go on while a prompt is read
    assert len(texts) == len(tasks)


def test_all_hidden_states_are_those_of_pytorch(texts: dict[int, DistillText], expected: dict[int, Any]) -> None:
    """Of prompts, answers, and the last token."""
    assert FEATURES == ("hidden_states.2", "hidden_states.3", "hidden_states.3", LAST)
    for number, text in texts.items():
        states = expected[number].hidden_states
        right = torch.cat([states[2], states[3], states[3], states[-1]], -1)[0].numpy()
        assert text.features is not None
        assert text.features.shape == (len(text.token_ids), 4 * HIDDEN_SIZE)
        assert text.features.dtype == np.float16
        np.testing.assert_allclose(text.features.astype(np.float32), right, atol=2e-3 * np.abs(right).max())


def test_likeliest_tokens_are_those_of_the_softmax(texts: dict[int, DistillText], expected: dict[int, Any]) -> None:
    """At temperature 1 for sampled texts, too; and none where the next token is not of the answer."""
    for number, text in texts.items():
        probs = torch.softmax(expected[number].logits[0, :, :404].double(), -1).numpy()
        begin, end = text.num_prompt_tokens - 1, len(text.token_ids) - 1
        empty = np.ones(len(text.token_ids), dtype=bool)
        empty[begin:end] = False
        assert (text.top_ids[empty] == -1).all()
        assert not text.top_probs[empty].any()
        for row in range(begin, end):
            count = int((text.top_ids[row] >= 0).sum())
            ids, found = text.top_ids[row, :count], text.top_probs[row, :count].astype(np.float64)
            assert (text.top_ids[row, count:] == -1).all()
            np.testing.assert_allclose(found, probs[row, ids], atol=5e-3)
            assert (np.diff(found) <= 0).all()
            assert len(set(ids.tolist())) == count > 0
            left = np.delete(probs[row], ids)
            assert left.max(initial=0) <= max(found[-1] + 5e-3, 2e-4)
        greedy = text.number % 2 == 0
        best = text.top_ids[begin:end, 0] == text.token_ids[begin + 1 :]
        assert best.all() if greedy else not best.all()


def test_a_text_depends_on_seed_and_number_alone(
    both: tuple[Bundle, Any], tasks: list[WritingTask], texts: dict[int, DistillText]
) -> None:
    other = Writer(both[0], features=FEATURES, max_new_tokens=MOST, batch_size=5, device=PRECISE)
    again = {text.number: text for text in other.write(reversed(tasks), seed=5)}
    for number, text in texts.items():
        np.testing.assert_array_equal(again[number].token_ids, text.token_ids)
        np.testing.assert_array_equal(again[number].top_probs, text.top_probs)
        np.testing.assert_array_equal(again[number].features, text.features)
    differing = {text.number: text.token_ids.tolist() for text in other.write(tasks, seed=6)}
    changed = {n for n, text in texts.items() if differing[n] != text.token_ids.tolist()}
    assert changed
    assert all(number % 2 for number in changed)
    renamed = [WritingTask(100 + task.number, task.token_ids, task.temperature) for task in tasks]
    assert any(differing[text.number - 100] != text.token_ids.tolist() for text in other.write(renamed, seed=6))


@pytest.mark.slow
def test_a_smaller_cache_makes_texts_wait(writer: Writer, both: tuple[Bundle, Any], tasks: list[WritingTask]) -> None:
    small = Writer(both[0], features=FEATURES, max_new_tokens=MOST, batch_size=3, device=PRECISE)
    assert isinstance(small._backend, OpenVINOPaged)
    small._backend.allocate(max(len(task.token_ids) for task in tasks) + MOST + small._backend.block_size)
    made = {text.number: text.token_ids.tolist() for text in small.write(tasks, seed=5)}
    assert made == {text.number: text.token_ids.tolist() for text in writer.write(tasks, seed=5)}


def test_a_writer_that_is_left_early_frees_its_slots(writer: Writer, tasks: list[WritingTask]) -> None:
    for _ in writer.write(tasks, seed=5):
        break
    assert writer._backend.cache.num_used_tokens == 0


def test_loops_end_early(writer: Writer, tasks: list[WritingTask], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_distill.texts.is_loop", lambda answer: len(answer) >= 16)
    made = list(writer.write(tasks[:4:2], seed=5))
    assert {(text.reason, len(text.token_ids) - text.num_prompt_tokens) for text in made} == {("loop", 16)}


@pytest.mark.parametrize(("token_ids", "wanted"), [
    ([*range(200)], False),
    ([1, 2, 3, 4] * 20, True),
    ([1, 2, 3, 4] * 15, False),  # too short to tell
    ([*range(100, 200)] + [*range(30)] * 3, True),
    ([*range(100, 200)] + [*range(30)] * 2, False),
    ([*range(30)] * 3 + [*range(100, 200)], False),  # it has found out again
])  # fmt: skip
def test_loops_are_found(token_ids: list[int], wanted: bool) -> None:
    assert is_loop(token_ids) is wanted


numbers = st.one_of(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=200),
    st.lists(st.floats(-3, 3, width=32), min_size=60, max_size=100),  # more than are kept
)
rows = numbers.map(lambda row: np.array(row, dtype=np.float32))


@pytest.mark.slow
@given(rows)
def test_top_probabilities_are_those_of_the_whole_row(logits: np.ndarray[Any, Any]) -> None:
    near = near_best(logits)
    exact = np.exp(logits.astype(np.float64) - logits.max())
    exact /= exact.sum()
    token_ids, probs = likeliest(near)
    assert near.best == logits.argmax()
    assert exact[token_ids[0]] == pytest.approx(exact.max())
    assert (
        len(token_ids) == min(NUM_KEPT, int((exact > 1e-4 * exact.max()).sum()))
        or np.isclose(exact, 1e-4 * exact.max(), rtol=1e-4).any()
    )
    np.testing.assert_allclose(probs, exact[token_ids], rtol=1e-4)
    left = np.delete(exact, token_ids)
    assert len(left) == 0 or left.max() <= max(probs[-1] * 1.001, 1.01e-4 * exact.max())


@pytest.mark.slow
@given(rows, st.sampled_from([0.5, 0.7, 1.0]))
def test_draws_have_the_softmaxs_frequencies(logits: np.ndarray[Any, Any], temperature: float) -> None:
    """Over an even grid of numbers, each token is drawn as often as its probability says, and one more or less."""
    count = 400
    near = near_best(logits)
    drawn = [draw(near, temperature, (i + 0.5) / count) for i in range(count)]
    exact = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    exact /= exact.sum()
    seen = np.bincount(drawn, minlength=len(logits))
    assert (np.abs(seen - count * exact) <= 1.1).all()


def test_a_row_that_is_no_number_is_said() -> None:
    with pytest.raises(DeviceError, match=r"not finite \(nan for token 1\)"):
        near_best(np.array([1, np.nan, 3], dtype=np.float32))


def test_a_larger_batch_has_to_be_worth_its_memory() -> None:
    assert _fastest({16: 100.0, 32: 104.0, 64: 104.9, 128: 104.0}) == 16
    assert _fastest({16: 100.0, 32: 110.0, 64: 112.0, 128: 150.0}) == 128
    assert _fastest({16: 100.0}) == 16


@pytest.mark.slow
def test_the_fastest_batch_that_fits_is_found(both: tuple[Bundle, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def seconds(self: Writer, _: Any, batch_size: int) -> float:
        tried.append(batch_size)
        return 1.0

    one = Writer(both[0], max_new_tokens=MOST, batch_size=1).cache_bytes_per_text / 1e9
    measured = Writer(both[0], max_new_tokens=MOST)
    assert measured.batch_size in writer_module.BATCH_SIZES
    monkeypatch.setattr(Writer, "_seconds", seconds)
    assert Writer(both[0], max_new_tokens=MOST, memory=70 * one).batch_size == 64
    assert tried == [16, 32, 64]
    assert Writer(both[0], max_new_tokens=MOST, max_batch_size=40).batch_size == 32
    with pytest.raises(ExportError, match=r"A batch of 16 texts needs 0\.\d\d GB for the KV cache, and 0\.00 GB"):
        Writer(both[0], max_new_tokens=MOST, memory=15 * one)


def test_what_cannot_be_written_is_said(both: tuple[Bundle, Any], writer: Writer) -> None:
    with pytest.raises(ExportError, match=r"has 2,000 tokens; it needs from 1 to 1,024"):
        list(writer.write([WritingTask(0, [5] * 2000)], seed=0))
    with pytest.raises(ExportError, match="The prompt of text 7 has 0 tokens"):
        list(writer.write([WritingTask(7, [])], seed=0))
    with pytest.raises(ExportError, match=r"does not give the hidden states .*hidden_states\.9.* draft model"):
        Writer(both[0], features=("hidden_states.9",), batch_size=1)
    with pytest.raises(ExportError, match=r"max_new_tokens=8,192 leaves no room"):
        Writer(both[0], max_new_tokens=8192, batch_size=1)
    with pytest.raises(ExportError, match="The main model has 2 layers"):
        tap_names(2)
