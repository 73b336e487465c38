"""Heads learn, are written whole, and are read back the same: with a tiny random main model."""

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.errors import ExportError
from outrider_distill.data import Data
from outrider_distill.train.files import load, save
from outrider_distill.train.fit import (
    PATIENCE,
    Stopped,
    Training,
    evaluate,
    find_device,
    fit,
    held_out,
    schedule,
    start_head,
)
from outrider_distill.train.layers import Teacher
from outrider_distill.train.places import TEXT_WEIGHT, Accuracy, Reach, Targets, columns_of, draft_loss
from outrider_distill.train.status import TrainingStatus, Watch

# Training data in the format of `outrider_distill.data`, written by hand.

KEPT = 32


def counting(num_conversations: int, vocab_size: int) -> list[list[int]]:
    """Conversations that count upwards, which any drafter can learn."""
    return [[(7 * i + j) % vocab_size for j in range(20 + i % 7)] for i in range(num_conversations)]


def write_shard(
    folder: Path,
    conversations: Sequence[Sequence[int]],
    states: Any = None,
    *,
    prompt_tokens: int = 5,
    greedy: bool = True,
    kept: int = 3,
) -> Path:
    """Write a shard with one prompt and one answer a conversation.

    states: for token ids int64 [n], the hidden states taps [n, 3h]; without it there are none. The main model gives the
    text's own token 0.8, the two numbers after it a tenth each.
    """
    folder.mkdir(parents=True)
    starts = np.cumsum([0, *map(len, conversations)], dtype=np.int64)
    tokens = np.concatenate([np.array(each, dtype=np.int32) for each in conversations])
    answer = np.concatenate([np.arange(len(each)) >= prompt_tokens for each in conversations])
    top_ids = np.full((len(tokens), KEPT), -1, dtype=np.int32)
    top_probs = np.zeros((len(tokens), KEPT), dtype=np.float16)
    for begin, end in pairwise(starts):
        predicting = np.flatnonzero(answer[begin + 1 : end]) + begin
        for i in range(kept):
            top_ids[predicting, i] = (tokens[predicting + 1] + i) % (tokens.max() + 1)
            top_probs[predicting, i] = 0.8 if i == 0 else 0.1
    arrays = {
        "tokens": tokens, "answer": answer, "starts": starts, "top_ids": top_ids, "top_probs": top_probs,
        "greedy": np.full(len(conversations), greedy),
    }  # fmt: skip
    if states is not None:
        found = [states(np.array(each, dtype=np.int64)) for each in conversations]
        arrays["taps"] = np.concatenate(found).astype(np.float16)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    lines = [json.dumps({"prompt": f"Count from {each[0]}.", "source": "user"}) for each in conversations]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


VOCAB_SIZE, HIDDEN_SIZE = 96, 32


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def main() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)


@pytest.fixture(scope="module")
def teacher(main: Any) -> Teacher:
    return Teacher.of(main)


def states_of(main: Any) -> Any:
    """Taps of a conversation, as `write_shard` takes them."""

    def states(token_ids: Any) -> Any:
        found = main.model(input_ids=torch.from_numpy(token_ids)[None], output_hidden_states=True).hidden_states
        return torch.cat([found[2], found[3], found[3]], -1)[0].numpy()

    return states


@pytest.fixture(scope="module")
def data(main: Any, tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Eighty conversations that count upwards, which any head can learn."""
    folder = tmp_path_factory.mktemp("data")
    conversations = counting(80, VOCAB_SIZE)
    write_shard(folder / "shard-00000", conversations[:50], states_of(main))
    write_shard(folder / "shard-00001", conversations[50:], states_of(main))
    return Data(folder)


def test_a_head_trains_and_is_read_back(teacher: Teacher, data: Data, tmp_path: Path) -> None:
    head, config = start_head(teacher, data)
    report = fit(head, data, num_steps=3)
    assert report["steps"] == 3
    places = report["held_out_acceptance_by_place"]
    assert len(places) >= 4
    assert all(0 <= each <= 1 for each in places)
    save(head, config, tmp_path / "head", report)
    assert json.loads((tmp_path / "head" / "training.json").read_text())["kind"] == "eagle3"
    assert [each.name for each in tmp_path.iterdir()] == ["head"]
    again = load(tmp_path / "head", teacher.embedding)
    assert again.kind == "eagle3"
    weights = again.state_dict()
    assert all(
        torch.allclose(each.float(), weights[name].float(), atol=1e-3) for name, each in head.state_dict().items()
    )


def test_drafting_token_by_token_is_what_was_trained(teacher: Teacher, data: Data) -> None:
    head, _ = start_head(teacher, data)
    batch = data.read([3])
    embedding, hidden = head._inputs(batch)
    root, num_steps = 9, 4
    with torch.no_grad():
        outs = head.unroll(embedding, hidden, num_steps)
        out, past = head(embedding[:, : root + 1], hidden[:, : root + 1], torch.arange(root + 1))
        assert torch.allclose(out, outs[0][:, : root + 1], atol=1e-4)
        for step in range(1, num_steps):
            at = root + step
            out, past = head(embedding[:, at : at + 1], out[:, -1:], torch.tensor([at]), past)
            assert torch.allclose(out[:, 0], outs[step][:, at], atol=1e-4)


def test_eagle3_stores_offsets(teacher: Teacher, data: Data) -> None:
    head, _ = start_head(teacher, data)
    head.start(teacher, torch.arange(0, VOCAB_SIZE, 1))
    assert not head.d2t.any()
    assert head.t2d.all()
    assert set(head.state_dict()) >= {"fc.weight", "midlayer.self_attn.q_proj.weight", "d2t", "t2d", "lm_head.weight"}
    assert not any("embed" in name for name in head.state_dict())


def test_accuracy_counts_a_place_only_after_right_ones() -> None:
    accuracy = Accuracy()
    right = torch.tensor([[True, True, False], [True, False, True], [False, True, True]])
    accuracy.add(right, torch.ones_like(right))
    assert accuracy.by_place() == [0.6667, 0.5, 0.0]
    assert accuracy.mean_length() == pytest.approx(1 + 2 / 3 + 1 / 3, abs=1e-3)


def test_what_is_no_good_is_said(teacher: Teacher, data: Data, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="config.json is missing"):
        load(tmp_path, teacher.embedding)
    head, config = start_head(teacher, data)
    save(head, config, tmp_path / "eagle3", {})
    with pytest.raises(ExportError, match="hidden_size 32, the main model has 16"):
        load(tmp_path / "eagle3", teacher.embedding[:, :16])


def test_the_rate_rises_and_falls() -> None:
    assert schedule(0, 1000) < schedule(40, 1000) == 1.0
    assert schedule(1000, 1000) == pytest.approx(0.05)
    assert schedule(9, 100) < schedule(10, 100) == schedule(3, 10) == 1.0  # the first steps of AdamW are blind


def targets(token_ids: list[int], top_ids: list[list[int]], top_probs: list[list[float]]) -> Targets:
    return Targets(torch.tensor(token_ids), torch.tensor(top_ids), torch.tensor(top_probs))


def test_the_loss_is_kl_mixed_with_cross_entropy() -> None:
    logits = torch.randn(1, 5, generator=torch.Generator().manual_seed(0))
    q = logits.softmax(-1)[0]
    columns = columns_of(torch.arange(5), 5)
    found = draft_loss(logits, targets([2], [[2, 4, -1]], [[0.75, 0.25, 0.0]]), columns)
    kl = 0.75 * torch.log(0.75 / q[2]) + 0.25 * torch.log(0.25 / q[4])
    assert torch.allclose(found[0], (1 - TEXT_WEIGHT) * kl - TEXT_WEIGHT * torch.log(q[2]))
    own = draft_loss(q.log()[None], targets([2], [[0, 1, 2, 3, 4]], [q.tolist()]), columns)
    assert torch.allclose(own[0], -TEXT_WEIGHT * torch.log(q[2]), atol=1e-5)


def test_the_loss_leaves_out_tokens_of_another_vocabulary() -> None:
    """Draft ids 0, 1, 2 are main ids 1, 3, 4: what the main model gives to 0 and 2 counts nowhere."""
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    columns = columns_of(torch.tensor([1, 3, 4]), 5)
    found = draft_loss(logits, targets([2, 3], [[2, 3], [0, 3]], [[0.5, 0.5], [0.5, 0.5]]), columns)
    log_q = logits.log_softmax(-1)[:, 1]
    kl = 0.5 * (np.log(0.5) - log_q)
    assert torch.allclose(found[0], (1 - TEXT_WEIGHT) * kl[0])
    assert torch.allclose(found[1], (1 - TEXT_WEIGHT) * kl[1] - TEXT_WEIGHT * log_q[1])


def test_a_target_is_what_the_main_model_says_after_the_token_before(data: Data) -> None:
    batch = data.read([3])
    row, column = torch.tensor([0, 0]), torch.tensor([9, 12])
    found = Targets.at(batch, row, column)
    assert found.token_ids.tolist() == batch.token_ids[0, [9, 12]].tolist()
    assert found.top_ids[:, 0].tolist() == found.token_ids.tolist()
    assert found.top_probs[:, 0].tolist() == pytest.approx([0.8, 0.8], abs=1e-3)


def test_places_weigh_as_much_as_they_are_reached() -> None:
    reach = Reach(3)
    right = torch.tensor([[True, False, True]] * 10)
    for _ in range(400):
        reach.follow(right, torch.ones_like(right))
    assert reach.acceptance[:2].tolist() == pytest.approx([1.0, 0.0], abs=1e-3)
    assert float(reach.acceptance[2]) == 0.5  # never reached, so that nothing is known
    assert reach.draw(0.99) == pytest.approx((2, 0.5), abs=1e-3)
    reach.acceptance[:] = 0.5
    assert reach.draw(0.0) == pytest.approx((3, 1 / 1.75))
    assert np.mean([reach.draw((i + 0.5) / 100)[0] for i in range(100)]) == pytest.approx(1.75)


@pytest.mark.slow
def test_training_lowers_the_loss_and_raises_acceptance(teacher: Teacher, data: Data) -> None:
    head, _ = start_head(teacher, data)
    report = fit(head, data, num_steps=50, seed=1, learning_rate=5e-3)
    before, after = report["curve"][0], report["curve"][-1]
    assert after["loss"] < 0.93 * before["loss"]
    assert after["tokens_per_round"] > before["tokens_per_round"] + 0.5
    assert report["held_out_tokens_per_round"] >= max(each["tokens_per_round"] for each in report["curve"]) - 0.01


class Remembered(Watch):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.num_evaluations = 0

    def stepped(self, status: TrainingStatus) -> None:
        self.losses.append(status.loss)

    def evaluated(self, status: TrainingStatus) -> None:
        self.num_evaluations += 1
        assert len(status.evaluations) == self.num_evaluations


@pytest.mark.slow
@pytest.mark.parametrize(("num_threads", "num_kills"), [(1, 3), (2, 2)])
def test_killed_many_times_it_ends_in_the_same_weights(
    num_threads: int, num_kills: int, teacher: Teacher, data: Data, tmp_path: Path
) -> None:
    torch.set_num_threads(num_threads)
    whole, _ = start_head(teacher, data)
    expected = fit(whole, data, num_steps=14, seed=3)
    path = tmp_path / "checkpoint.pt"
    for stop in sorted(np.random.default_rng(5).choice(np.arange(1, 14), num_kills, replace=False).tolist()):
        head, _ = start_head(teacher, data)
        with pytest.raises(Stopped):
            fit(head, data, num_steps=14, seed=3, checkpoint=path, stopped=Countdown(stop, path))
    head, _ = start_head(teacher, data)
    report = fit(head, data, num_steps=14, seed=3, checkpoint=path)
    weights = whole.state_dict()
    assert all(torch.equal(each, weights[name]) for name, each in head.state_dict().items())
    assert {**report, "hours": 0} == {**expected, "hours": 0}
    seen, (head, _) = Remembered(), start_head(teacher, data)
    assert fit(head, data, num_steps=14, seed=3, checkpoint=path, watch=seen) == report  # is not done again
    assert seen.losses == []
    assert torch.equal(head.state_dict()["lm_head.weight"], weights["lm_head.weight"])


class Countdown:
    """Says to stop at a step, counted over all runs."""

    def __init__(self, stop: int, checkpoint: Path) -> None:
        done = torch.load(checkpoint, weights_only=True)["counts"][0] if checkpoint.exists() else 0
        self._left = stop - done

    def __call__(self) -> bool:
        self._left -= 1
        return self._left <= 0


def test_a_checkpoint_of_another_training_or_a_damaged_one_is_refused(
    teacher: Teacher, data: Data, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    head, _ = start_head(teacher, data)
    fit(head, data, num_steps=2, checkpoint=path)
    with pytest.raises(ExportError, match="another training.*3 steps"):
        fit(head, data, num_steps=3, checkpoint=path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ExportError, match=r"cannot be read.*Delete it"):
        fit(head, data, num_steps=2, checkpoint=path)


def test_kernels_for_the_shapes_of_earlier_batches_are_not_kept(
    teacher: Teacher, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They grew by 20 MB a step for a model of 1.5B. The user's own limits stay."""
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "100")
    Training(start_head(teacher, data)[0], data, 1, 0, 1.0, None)
    assert int(os.environ["LRU_CACHE_CAPACITY"]) < 20
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "100"


@pytest.mark.slow
def test_training_ends_when_more_does_not_help(teacher: Teacher, data: Data) -> None:
    """At a rate of nearly nothing, no evaluation is better than the first."""
    head, _ = start_head(teacher, data)
    report = fit(head, data, num_steps=100, learning_rate=1e-12)
    assert report["steps"] == 4 * (PATIENCE + 1)
    assert report["planned_steps"] == 100


@pytest.mark.slow
def test_the_best_weights_are_kept(teacher: Teacher, data: Data) -> None:
    """A rate that is far too high has its best evaluation early."""
    head, _ = start_head(teacher, data)
    report = fit(head, data, num_steps=100, learning_rate=1.0)
    assert report["held_out_acceptance_by_place"] != report["curve"][-1]["acceptance"]
    with find_device()[1]():
        assert evaluate(head, data).by_place() == report["held_out_acceptance_by_place"]


def test_a_loss_that_is_no_number_is_said(teacher: Teacher, data: Data) -> None:
    head, _ = start_head(teacher, data)
    with torch.no_grad():
        head.state_dict()["lm_head.weight"].fill_(float("nan"))
    with pytest.raises(ExportError, match="loss of nan at step 0.*lower"):
        fit(head, data, num_steps=2)


def test_starting_a_head_leaves_the_programs_random_numbers_alone(teacher: Teacher, data: Data) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    start_head(teacher, data)
    assert torch.equal(torch.rand(1), expected)


def test_a_short_training_is_evaluated_seldom(teacher: Teacher, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of several batches takes as long as several steps."""
    monkeypatch.setattr("outrider_distill.train.fit.TOKENS_IN_USUAL_BATCH", 32)
    every = len(held_out("eagle3", data))
    assert every > 1
    head, _ = start_head(teacher, data)
    report = fit(head, data, num_steps=2 * every)
    assert [each["step"] for each in report["curve"]] == [every, 2 * every]
