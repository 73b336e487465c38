"""Heads learn, are written whole, and are read back the same: with a tiny random main model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from outrider.errors import ExportError
from outrider_export.train.answers import is_good_prompt, is_loop
from outrider_export.train.data import Data, tapped_layers, write_features
from outrider_export.train.files import KINDS, load, save
from outrider_export.train.fit import fit, schedule, start_head
from outrider_export.train.layers import Teacher
from outrider_export.train.places import Accuracy

if TYPE_CHECKING:
    from pathlib import Path

VOCAB_SIZE, HIDDEN_SIZE = 96, 32


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


@pytest.fixture(scope="module")
def folder(main: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty conversations that count upwards, which any head can learn."""
    folder: Path = tmp_path_factory.mktemp("data")
    with (folder / "conversations.jsonl").open("w", encoding="utf-8") as file:
        for i in range(40):
            text = [(i + j) % VOCAB_SIZE for j in range(20 + i % 7)]
            record = {"prompt": str(i), "temperature": 0.0, "prompt_token_ids": text[:5], "answer_token_ids": text[5:]}
            file.write(json.dumps(record) + "\n")
    assert write_features(folder, main) == sum(20 + i % 7 for i in range(40))
    assert write_features(folder, main) == 0
    return folder


@pytest.fixture(scope="module")
def data(folder: Path) -> Data:
    return Data(folder)


def make(kind: str, teacher: Teacher, data: Data) -> tuple[Any, dict[str, Any]]:
    return start_head(kind, teacher, data, mask_token_id=VOCAB_SIZE - 1 if kind == "dflash" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_trains_and_is_read_back(kind: str, teacher: Teacher, data: Data, tmp_path: Path) -> None:
    head, config = make(kind, teacher, data)
    report = fit(head, data, minutes=0.02, tell=lambda _: None)
    assert report["steps"] > 0
    places = report["held_out_accuracy_by_place"]
    assert len(places) >= 4
    assert all(0 <= each <= 1 for each in places)
    save(head, config, tmp_path / kind, report)
    assert json.loads((tmp_path / kind / "training.json").read_text())["kind"] == kind
    assert [each.name for each in tmp_path.iterdir()] == [kind]
    again = load(tmp_path / kind, teacher.embedding, teacher.lm_head)
    assert again.kind == kind
    weights = again.state_dict()
    assert all(
        torch.allclose(each.float(), weights[name].float(), atol=1e-3) for name, each in head.state_dict().items()
    )


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp"])
def test_drafting_token_by_token_is_what_was_trained(kind: str, teacher: Teacher, data: Data) -> None:
    head, _ = make(kind, teacher, data)
    batch = data.read([3])
    embedding, hidden, _ = head._inputs(batch)
    root, num_steps = 9, 4
    with torch.no_grad():
        outs = head.unroll(embedding, hidden, num_steps)
        out, past = head(embedding[:, : root + 1], hidden[:, : root + 1], torch.arange(root + 1))
        assert torch.allclose(out, outs[0][:, : root + 1], atol=1e-4)
        for step in range(1, num_steps):
            at = root + step
            out, past = head(embedding[:, at : at + 1], out[:, -1:], torch.tensor([at]), past)
            assert torch.allclose(out[:, 0], outs[step][:, at], atol=1e-4)


def test_blocks_of_one_pass_are_what_they_are_alone(teacher: Teacher, data: Data) -> None:
    head, _ = make("dflash", teacher, data)
    batch = data.read([3, 4])
    with torch.no_grad():
        together, places, valid = head._blocks(batch, torch.Generator().manual_seed(0))
        anchor = int(places[1, 5, 0]) - 1
        token_ids = torch.tensor([[int(batch.token_ids[1, anchor])] + [head.mask_token_id] * (head.block_size - 1)])
        context = head.context(batch.taps[1:, :anchor], torch.arange(anchor))
        out = head(teacher.embedding[token_ids], anchor + torch.arange(head.block_size), context)
    assert valid[1, 5, 0]
    assert torch.allclose(out[:, 1:], together[1, 5], atol=1e-4)


def test_masks_behind_a_text_are_what_they_are_in_training(main: Any, teacher: Teacher, data: Data) -> None:
    head, _ = make("masks", teacher, data)
    batch = data.read([3, 4])
    with torch.no_grad():
        together, targets, _ = head._masked(batch, torch.Generator().manual_seed(0))
        anchor = int(targets[1, 5, 0]) - 2
        embedded = head(teacher.embedding[batch.token_ids[1:, : anchor + 1]])
        alone = main.model(inputs_embeds=embedded).last_hidden_state[0, anchor + 1 :]
    assert torch.allclose(alone, together[1, 5], atol=1e-4)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "blockwise"])
def test_drafts_of_heads_are_what_is_evaluated(kind: str, teacher: Teacher, data: Data) -> None:
    head, _ = make(kind, teacher, data)
    batch = data.read([3])
    with torch.no_grad():
        right, valid = head.hits(batch)
        at = 8
        drafts = head(batch.last[:, at], batch.token_ids[:, at + 1])[0]
    wanted = batch.token_ids[0, at + 2 : at + 2 + head.num_heads]
    assert valid[at].all()
    assert int((drafts == wanted).cumprod(0).sum()) == int(right[at].cumprod(0).sum())


def test_eagle3_stores_offsets(teacher: Teacher, data: Data) -> None:
    head, _ = make("eagle3", teacher, data)
    head.start(teacher, torch.arange(0, VOCAB_SIZE, 1))
    assert not head.d2t.any()
    assert head.t2d.all()
    assert set(head.state_dict()) >= {"fc.weight", "midlayer.self_attn.q_proj.weight", "d2t", "t2d", "lm_head.weight"}
    assert not any("embed" in name for name in head.state_dict())


def test_features_are_the_main_models(main: Any, data: Data) -> None:
    batch = data.read([3])
    states = main.model(input_ids=batch.token_ids, output_hidden_states=True).hidden_states
    taps = torch.cat([states[2], states[3], states[3]], -1)  # layers 1, 2 and 2 of 6: inputs of 2, 3 and 3
    assert torch.allclose(batch.taps, taps, rtol=1e-2, atol=1e-3)
    assert torch.allclose(batch.last, states[-1], rtol=1e-2, atol=1e-3)
    assert tapped_layers(6) == [1, 2, 2]
    assert batch.answer[0].tolist() == [False] * 5 + [True] * (batch.answer.shape[1] - 5)


def test_held_out_conversations_are_not_trained_on(data: Data) -> None:
    trained = {i for epoch in range(3) for rows in data.batches(100, epoch) for i in rows}
    held_out = {i for rows in data.held_out(100, 10**6) for i in rows}
    assert held_out == {0, 20}
    assert trained == set(range(40)) - held_out


def test_accuracy_counts_a_place_only_behind_right_ones() -> None:
    accuracy = Accuracy()
    right = torch.tensor([[True, True, False], [True, False, True], [False, True, True]])
    accuracy.add(right, torch.ones_like(right))
    assert accuracy.by_place() == [0.6667, 0.5, 0.0]
    assert accuracy.mean_length() == pytest.approx(1 + 2 / 3 + 1 / 3, abs=1e-3)


def test_what_is_no_good_is_said(teacher: Teacher, data: Data, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="has no features"):
        Data(tmp_path)
    with pytest.raises(ExportError, match="conversations.jsonl is missing"):
        write_features(tmp_path, None)
    with pytest.raises(ExportError, match="Did you mean 'medusa'"):
        start_head("medussa", teacher, data)
    with pytest.raises(ExportError, match="mask_token_id"):
        start_head("dflash", teacher, data)
    with pytest.raises(ExportError, match="config.json is missing"):
        load(tmp_path, teacher.embedding, teacher.lm_head)
    with pytest.raises(ExportError, match="at least 6"):
        tapped_layers(4)
    head, config = make("mtp", teacher, data)
    save(head, config, tmp_path / "mtp", {})
    with pytest.raises(ExportError, match="hidden size 32, the main model has 16"):
        load(tmp_path / "mtp", teacher.embedding[:, :16], teacher.lm_head[:, :16])


def test_loops_and_fragments_are_left_out() -> None:
    assert is_loop([1, 2, 3, 4] * 20)
    assert not is_loop(list(range(80)))
    assert is_good_prompt("What is the capital of France?")
    assert not is_good_prompt("Hi")
    assert not is_good_prompt("yes yes yes yes yes yes")


def test_the_rate_rises_and_falls() -> None:
    assert schedule(0) < schedule(0.04) == 1.0
    assert schedule(1.0) == pytest.approx(0.05)
