"""A small draft model made of a larger one: tiny random models, with a tokenizer as real ones have."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exports import Recorder, check_answers
from outrider.bundle import read_bundle
from outrider.errors import ExportError, OptionError, VocabularyMismatch
from outrider_distill.data import TrainingBatch
from outrider_distill.draft.files import load_torch, open_source, restore_draft, save_draft, start_draft
from outrider_distill.draft.layers import (
    Walk,
    by_search,
    choose_layers,
    columns_of,
    cut_layers,
    logits_of,
)
from outrider_distill.draft.model import NUM_PLACES, TrainedDraftModel
from outrider_distill.train.places import Accuracy, Targets, kl_of_top
from outrider_export import Silent, export_bundle
from outrider_export.describe.pairing import pair_vocabularies
from outrider_export.describe.plan import Plan, make_plan
from outrider_export.describe.special_tokens import eos_of
from outrider_export.diet.diet import ALL, TRAINED_NAME, choose_by_counts, plan_diet
from outrider_export.sources.source import locate
from outrider_export.tokenizers.vocabulary import Vocabulary

NUM_LAYERS, TOP = 6, 32
IDENTITY = (2, 3)  # layers that change nothing
SPECIAL = [400, 401, 402, 403]


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Any) -> Path:
    """Random, and with two layers that change nothing."""
    from safetensors.torch import load_file, save_file

    folder: Path = make_checkpoint("draft-source", num_hidden_layers=NUM_LAYERS, seed=5)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if any(f"layers.{i}.{part}" in name for i in IDENTITY for part in ("self_attn.o_proj", "mlp.down_proj")):
            weight.zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def vocabulary(checkpoint: Path) -> Vocabulary:
    return Vocabulary.of_folder(checkpoint)


@pytest.fixture(scope="module")
def source(checkpoint: Path, vocabulary: Vocabulary) -> Plan:
    return open_source(checkpoint, vocabulary, "main", Silent())


@pytest.fixture(scope="module")
def loaded(source: Plan) -> Any:
    return load_torch(source)


@pytest.fixture
def model(loaded: Any) -> Any:
    return copy.deepcopy(loaded)


def batch_of(model: Any, seed: int = 0, rows: int = 6, width: int = 24) -> TrainingBatch:
    """Random prompts with greedy answers of `model`, of unequal lengths, and its likeliest tokens after them."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(400, (rows, 5), generator=generator)
    with torch.no_grad():
        while token_ids.shape[1] < width:
            logits = model(input_ids=token_ids, use_cache=False).logits[:, -1, :400]
            token_ids = torch.cat([token_ids, logits.argmax(-1, keepdim=True)], 1)
        probs, ids = model(input_ids=token_ids, use_cache=False).logits.softmax(-1).topk(TOP, -1)
    lengths = width - torch.arange(rows)[:, None]
    answer = (torch.arange(width) >= 5) & (torch.arange(width) < lengths)
    goes_on = torch.nn.functional.pad(answer[:, 1:], (0, 1))[..., None]
    token_ids = token_ids * (torch.arange(width) < lengths)
    return TrainingBatch(token_ids, answer, None, torch.where(goes_on, ids, -1), torch.where(goes_on, probs, 0.0))


@pytest.fixture(scope="module")
def batch(loaded: Any) -> TrainingBatch:
    return batch_of(loaded)


# Layers


def logits_without(model: Any, token_ids: Any, left_out: set[int]) -> Any:
    """Of the whole model, where these layers pass on what they read."""
    hooks = [model.model.layers[i].register_forward_hook(lambda _, inputs, out: inputs[0].clone()) for i in left_out]
    with torch.no_grad():
        logits = model(input_ids=token_ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits


def test_a_cut_model_is_the_original_without_these_layers(model: Any, batch: TrainingBatch) -> None:
    expected = logits_without(model, batch.token_ids, {1, 2, 5})
    cut_layers(model, [0, 3, 4])
    with torch.no_grad():
        found = model(input_ids=batch.token_ids, use_cache=False).logits
        text = model.generate(batch.token_ids[:1, :5], max_new_tokens=4, do_sample=False)  # with a cache
        again = model(input_ids=text, use_cache=False).logits
    assert torch.equal(found, expected)
    assert text[0, 5:].tolist() == again[0, 4:-1].argmax(-1).tolist()
    assert model.config.num_hidden_layers == len(model.config.layer_types) == 3


def test_layers_that_change_nothing_are_left_out(model: Any, batch: TrainingBatch) -> None:
    with torch.no_grad():
        walks = [Walk(model, batch), Walk(model, batch_of(model, seed=1))]
        assert by_search(walks, 4, lambda _: None) == (0, 1, 4, 5)


def test_a_cut_is_scored_by_the_whole_model_without_the_others(model: Any) -> None:
    for i in (0, 4):
        for matrix in (model.model.layers[i].self_attn.o_proj, model.model.layers[i].mlp.down_proj):
            torch.nn.init.zeros_(matrix.weight)
    batch = batch_of(model)
    told: list[str] = []
    cut = choose_layers(model, [batch], 2, tell=told.append)
    assert cut.kept == (1, 5)
    assert told[-1] == str(cut)
    assert choose_layers(model, [batch], None).kept == tuple(range(NUM_LAYERS))
    cut = choose_layers(model, [batch], 1, tell=told.append)
    logits = logits_without(model, batch.token_ids, set(range(NUM_LAYERS)) - set(cut.kept))
    predicting = torch.nn.functional.pad(batch.answer[:, 1:], (0, 1))
    kl = 0.0
    for row, t in predicting.nonzero().tolist():
        ours = logits[row, t].log_softmax(-1)
        for token_id, prob in zip(batch.top_ids[row, t].tolist(), batch.top_probs[row, t].tolist(), strict=True):
            kl += prob * (np.log(prob) - float(ours[token_id])) if prob else 0.0
    assert cut.kl == pytest.approx(kl / int(predicting.sum()), rel=1e-3)


def test_the_search_is_greedy(model: Any, batch: TrainingBatch) -> None:
    """Step by step the layer that costs least, by passes of the whole model."""
    with torch.no_grad():
        walk = Walk(model, batch)
    left_out: set[int] = set()
    expected = []
    while len(left_out) < 4:
        costs = {}
        for i in set(range(NUM_LAYERS)) - left_out:
            states: list[Any] = []
            hook = model.model.norm.register_forward_pre_hook(lambda _, inputs, states=states: states.append(inputs[0]))
            logits_without(model, batch.token_ids, left_out | {i})
            hook.remove()
            with torch.no_grad():
                kl, count = walk.kl(states[0])
                costs[i] = kl / count
        best = min(costs, key=costs.__getitem__)
        left_out.add(best)
        expected.append(f"without layer {best}: KL {costs[best]:.3f}")
    told: list[str] = []
    with torch.no_grad():
        assert by_search([walk], 2, told.append) == tuple(sorted(set(range(NUM_LAYERS)) - left_out))
    assert told == expected


@pytest.mark.parametrize("num_layers", [0, NUM_LAYERS])
def test_no_more_layers_than_there_are(model: Any, batch: TrainingBatch, num_layers: int) -> None:
    with pytest.raises(OptionError, match=rf"layers={num_layers} cannot .* with 6. Choose from 1 to 5"):
        choose_layers(model, [batch], num_layers)


def test_other_layouts_are_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2))
    with pytest.raises(ExportError, match="No layers can be taken out of a GPT2LMHeadModel"):
        cut_layers(model, [0])


# Vocabulary


def test_the_tokens_that_answers_have_are_proposed_with_the_special_ones(source: Plan) -> None:
    counts = np.zeros(448, dtype=np.int64)
    counts[[7, 300, 301]] = 50

    def choose(num_tokens: int | None) -> Any:
        return choose_by_counts(source.vocabulary, eos_of(source), num_tokens, counts, Silent())

    chosen = choose(10)
    assert chosen is not None
    assert chosen.tolist() == [0, 1, 2, 7, 300, 301, *SPECIAL]
    assert choose(0) is None
    assert choose(None) is None  # a small vocabulary stays whole
    with pytest.raises(OptionError, match="leaves no room for text: 4 special tokens"):
        choose(4)


def test_another_vocabulary_is_refused(
    make_checkpoint: Any, build_tokenizer: Any, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    tokenizer = build_tokenizer(special=("<|endoftext|>", "<|start|>", "<|im_end|>"))
    other = make_checkpoint("draft-other", tokenizer=tokenizer)
    with pytest.raises(VocabularyMismatch, match=r"401 is '<\|im_start\|>' and '<\|start\|>'.*--draft draft-other"):
        open_source(other, vocabulary, "main", Silent())
    shorter = Vocabulary(vocabulary.tokens[:-1], vocabulary.special_token_ids)
    with pytest.raises(VocabularyMismatch, match="they have 403 and 404 tokens"):
        open_source(make_checkpoint("draft-plain"), shorter, "main", Silent())


def test_kl_is_over_the_tokens_that_both_have(model: Any) -> None:
    token_ids = torch.tensor([3, 10, 40])
    log_probs = torch.tensor([[0.5, 0.3, 0.2]]).log()
    targets = Targets(torch.tensor([3]), torch.tensor([[10, 5, 3, -1]]), torch.tensor([[0.6, 0.3, 0.1, 0.0]]))
    kl = kl_of_top(log_probs, targets, columns_of(model, token_ids))
    assert float(kl) == pytest.approx(0.6 * np.log(0.6 / 0.3) + 0.1 * np.log(0.1 / 0.5), rel=1e-5)


# Training


def train(head: TrainedDraftModel, batches: list[TrainingBatch], num_steps: int) -> None:
    optimizer = torch.optim.AdamW([each for each in head.parameters() if each.requires_grad], lr=1e-3)
    for step in range(num_steps):
        optimizer.zero_grad()
        head.loss(batches[step % len(batches)]).backward()
        optimizer.step()


def kl_of(head: TrainedDraftModel, batch: TrainingBatch) -> float:
    predicting = batch.answer[:, 1:]
    with torch.no_grad():
        log_probs = head._logits(batch, predicting).log_softmax(-1)
        row, column = predicting.nonzero(as_tuple=True)
        return float(kl_of_top(log_probs, Targets.at(batch, row, column + 1), head.columns).mean())


@pytest.mark.slow
@pytest.mark.parametrize("token_ids", [None, [*range(0, 400, 2), *SPECIAL]])
def test_training_brings_the_main_models_distribution_nearer(model: Any, loaded: Any, token_ids: Any) -> None:
    cut_layers(model, [0, 1, 5])
    head = TrainedDraftModel(model, None if token_ids is None else torch.tensor(token_ids))
    batches = [batch_of(loaded, seed, rows=12) for seed in range(4)]
    before = kl_of(head, batches[0])
    train(head, batches, 40)
    assert kl_of(head, batches[0]) < 0.8 * before


def test_embeddings_stay_as_they_are(model: Any, batch: TrainingBatch) -> None:
    head = TrainedDraftModel(model)
    before = [matrix.weight.clone() for matrix in (model.get_input_embeddings(), model.get_output_embeddings())]
    train(head, [batch], 1)
    after = [matrix.weight for matrix in (model.get_input_embeddings(), model.get_output_embeddings())]
    assert all(map(torch.equal, before, after))


def test_the_loss_is_of_answers_alone(model: Any, batch: TrainingBatch) -> None:
    """What comes after a text, or which tokens its prompt would go on with, changes nothing."""
    head = TrainedDraftModel(model)
    loss = float(head.loss(batch).detach())
    after = ~batch.answer & (torch.arange(24) >= 5)
    other = batch._replace(token_ids=torch.where(after, 77, batch.token_ids))
    assert float(head.loss(other).detach()) == pytest.approx(loss, rel=1e-6)
    other = batch._replace(token_ids=torch.where(batch.answer, (batch.token_ids + 1) % 400, batch.token_ids))
    assert float(head.loss(other).detach()) != pytest.approx(loss, rel=1e-3)
    nothing = batch._replace(answer=torch.zeros_like(batch.answer))
    assert float(head.loss(nothing).detach()) == 0


@pytest.mark.slow
def test_hits_are_those_of_drafting_token_by_token(model: Any, batch: TrainingBatch) -> None:
    """The source itself is always right; cut, it is right as far as its own greedy text is the same."""
    accuracy = Accuracy()
    accuracy.add(*TrainedDraftModel(copy.deepcopy(model), torch.arange(400)).hits(batch))
    assert accuracy.by_place() == [1.0] * NUM_PLACES
    cut_layers(model, [0, 1, 4])
    token_ids = torch.tensor(sorted({*range(0, 400, 3), *batch.token_ids[:, 8:14].flatten().tolist(), *SPECIAL}))
    head = TrainedDraftModel(model, token_ids)
    train(head, [batch], 60)
    with torch.no_grad():
        right, valid = (each.unflatten(0, (len(batch.answer), -1)) for each in head.hits(batch))
    lengths = set()
    for row in range(len(batch.answer)):
        end = int(batch.answer[row].nonzero().max()) + 1
        for root in range(23):
            count = min(NUM_PLACES, end - 1 - root) if 5 <= root < end - 1 else 0
            assert valid[row, root].tolist() == [i < count for i in range(NUM_PLACES)]
            if count:
                drafted = drafts_of(model, batch.token_ids[row : row + 1, : root + 1], token_ids, count)
                wanted = batch.token_ids[row, root + 1 : root + 1 + count]
                same = int((drafted == wanted).cumprod(0).sum())
                assert int(right[row, root, :count].cumprod(0).sum()) == same
                lengths.add(same)
    assert len(lengths) > 2


def drafts_of(model: Any, token_ids: Any, proposed: Any, count: int) -> Any:
    """int64 [count]: greedy tokens of `proposed`."""
    start = token_ids.shape[1]
    for _ in range(count):
        with torch.no_grad():
            hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state[0, -1:]
            token_ids = torch.cat([token_ids, proposed[logits_of(model, hidden, proposed).argmax(-1)][None]], 1)
    return token_ids[0, start:]


def test_logits_that_are_more_than_a_product_are_refused() -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = GraniteConfig(vocab_size=32, hidden_size=16, intermediate_size=16, logits_scaling=8.0, **shape)
    torch.manual_seed(0)
    model = GraniteForCausalLM(config)
    torch.nn.init.normal_(model.get_output_embeddings().weight)
    with pytest.raises(ExportError, match="GraniteForCausalLM scales or caps its logits"):
        TrainedDraftModel(model)


def test_what_was_started_is_restored(source: Plan, batch: TrainingBatch) -> None:
    counts = np.bincount(batch.token_ids[batch.answer], minlength=448)
    progress = Recorder()
    head, cut = start_draft(source, counts, [batch], num_layers=3, num_tokens=100, progress=progress)
    assert head.token_ids.shape == (100,)
    assert set(batch.token_ids[batch.answer].tolist()) < set(head.token_ids.tolist())
    assert progress.notes[0].startswith("draft vocabulary: 100 of 404 tokens; 100.0%")
    assert str(cut) in progress.notes
    _, fewer = start_draft(source, counts, [batch], num_layers=2, num_tokens=100, progress=progress, within=cut.kept)
    _, alone = start_draft(source, counts, [batch], num_layers=2, num_tokens=100, progress=progress)
    assert fewer.kept == alone.kept  # the search for fewer layers comes through there
    again = restore_draft(source, cut.kept, head.token_ids.tolist())
    with torch.no_grad():
        assert torch.equal(head.loss(batch), again.loss(batch))
    assert (again.kind, again.num_places, again.vocab_size) == ("draft", NUM_PLACES, 448)


# Files


def make(loaded: Any, source: Plan, folder: Path, token_ids: list[int]) -> TrainedDraftModel:
    """A folder of a cut and briefly trained model."""
    model = copy.deepcopy(loaded)
    cut_layers(model, [0, 1, 5])
    head = TrainedDraftModel(model, torch.tensor(token_ids))
    train(head, [batch_of(loaded)], 5)
    save_draft(head, source, folder, {"kind": "draft", "layers": [0, 1, 5]})
    return head


TOKEN_IDS = [*range(0, 400, 2), *SPECIAL]


@pytest.fixture(scope="module")
def saved(loaded: Any, source: Plan, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainedDraftModel, Path]:
    folder: Path = tmp_path_factory.mktemp("saved") / "drafter"
    return make(loaded, source, folder, TOKEN_IDS), folder


def test_a_saved_draft_model_is_a_checkpoint(saved: tuple[TrainedDraftModel, Path], batch: TrainingBatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    head, folder = saved
    again = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert again.config.num_hidden_layers == 3
    assert again.dtype == torch.float16
    with torch.no_grad():
        expected = head.model(input_ids=batch.token_ids).logits
        assert torch.allclose(again.float()(input_ids=batch.token_ids).logits, expected, atol=0.05)
    assert AutoTokenizer.from_pretrained(folder, local_files_only=True)("quick")["input_ids"]
    assert again.generation_config.eos_token_id == [400, 402]
    assert json.loads((folder / "training.json").read_text())["layers"] == [0, 1, 5]
    assert head.model.dtype == torch.float32
    assert sorted(path.name for path in folder.parent.iterdir()) == ["drafter"]


@pytest.mark.slow
def test_a_gguf_file_gives_the_same_model(
    make_gguf: Any, checkpoint: Path, vocabulary: Vocabulary, loaded: Any, batch: TrainingBatch, tmp_path: Path
) -> None:
    source = open_source(make_gguf("draft-source", checkpoint), vocabulary, "main", Silent())
    assert source.vocabulary.tokens == vocabulary.tokens
    read = load_torch(source)
    with torch.no_grad():
        found, expected = (each(input_ids=batch.token_ids).logits for each in (read, loaded))
    assert float((found.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.9
    make(read, source, tmp_path / "drafter", TOKEN_IDS)
    again = open_source(tmp_path / "drafter", vocabulary, "main", Silent())
    assert again.vocabulary.tokens == vocabulary.tokens
    assert load_torch(again).generation_config.eos_token_id == [400, 402]


@pytest.mark.parametrize(("num_tokens", "corpus", "expected"), [
    (None, [], TOKEN_IDS), (None, ["quick"], TOKEN_IDS), (30, [], 30), (300, [], TOKEN_IDS), (ALL, [], None),
])  # fmt: skip
def test_export_proposes_what_was_trained(
    saved: tuple[TrainedDraftModel, Path], source: Plan, num_tokens: int | None, corpus: list[str], expected: Any
) -> None:
    plan = make_plan("draft", locate(saved[1]), "openvino", "fp32")
    diet = plan_diet(plan, pair_vocabularies(source, plan, Silent()), num_tokens, corpus)
    chosen = None if diet is None else diet.choose_by([], Silent()).tolist()
    if num_tokens == 30:
        assert chosen is not None
        assert len(chosen) == expected
        assert {*SPECIAL} <= {*chosen} <= {*TOKEN_IDS}
    else:
        assert chosen == expected


@pytest.mark.parametrize("content", [{}, {"token_ids": [404]}, {"token_ids": [-1]}, {"token_ids": 3}])
def test_a_damaged_vocabulary_is_refused(
    saved: tuple[TrainedDraftModel, Path], checkpoint: Path, tmp_path: Path, content: Any
) -> None:
    shutil.copytree(saved[1], tmp_path / "drafter")
    (tmp_path / "drafter" / TRAINED_NAME).write_text(json.dumps(content))
    with pytest.raises(ExportError, match=r"draft_vocab.json has no 'token_ids' from 0 to 403"):
        export_bundle(checkpoint, tmp_path / "drafter", output=tmp_path / "pair")


@pytest.mark.slow
def test_an_exported_pair_says_what_the_main_model_says(
    saved: tuple[TrainedDraftModel, Path], checkpoint: Path, tmp_path: Path
) -> None:
    bundle = export_bundle(checkpoint, saved[1], output=tmp_path / "pair", weights="fp32", draft_weights="fp32")
    (drafter,) = read_bundle(bundle.folder).manifest.drafters
    assert (drafter.model.geometry.num_layers, drafter.num_proposed_tokens) == (3, len(TOKEN_IDS))
    assert bundle.read_proposed(drafter).tolist() == TOKEN_IDS
    check_answers(bundle.folder, "def quicksort")
