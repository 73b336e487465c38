"""Training data: what is asked, what is kept, and that it is written again as it was."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from answering import HIDDEN_SIZE, PROMPTS, make_bundle
from outrider.bundle import Bundle
from outrider.errors import ExportError, OptionError
from outrider.inputs.text import Tokenizer
from outrider_distill import answers as answers_module
from outrider_distill.answers import DataProgress, write_data
from outrider_distill.data import Conversation, Data, Recipe, Shard, bytes_per_token, find_shards
from outrider_distill.prompts import (
    MODEL,
    OPENINGS,
    USER,
    DistillPrompt,
    Filter,
    general_prompts,
    is_refusal,
    make_follow_ups,
    make_prompts,
    read_prompts,
    texts_in,
)
from outrider_distill.texts import DistillText
from outrider_distill.writer import Writer

RECIPE = Recipe(2500, taps=True, seed=3, max_new_tokens=20, user_share=0.9)
EXCLUDED = [DistillPrompt(each) for each in PROMPTS[10:40]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tmp_path_factory.mktemp("answering"))[0]


def write(folder: Path, bundle: Bundle, recipe: Recipe = RECIPE, **options: Any) -> DataProgress:
    prompts = [DistillPrompt(each) for each in [*PROMPTS, *PROMPTS[:5]]]
    return write_data(folder, bundle, recipe, prompts=prompts, excluded=EXCLUDED, **{"batch_size": 8, **options})


@pytest.fixture(scope="module")
def made(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DataProgress]:
    folder = tmp_path_factory.mktemp("made") / "data"
    return folder, write(folder, bundle)


@pytest.fixture(scope="module")
def data(made: tuple[Path, DataProgress]) -> Data:
    return Data(made[0])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def asked_in(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for shard in find_shards(folder)
        for line in (shard / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def test_shards_have_what_they_promise(made: tuple[Path, DataProgress], data: Data) -> None:
    folder, progress = made
    assert progress.num_tokens == data.num_answer_tokens >= progress.num_wanted == 2500
    assert progress.num_conversations == data.num_conversations
    assert progress.removed["excluded prompt"] == 30
    assert progress.removed["duplicate prompt"] >= 5
    assert len(find_shards(folder)) == 3
    assert data.has_taps
    assert data.hidden_size == HIDDEN_SIZE
    size = sum(each.stat().st_size for each in folder.rglob("*.npy") if each.stem not in ("starts", "greedy"))
    headers = 3 * 5 * 128
    assert size == data.num_tokens * bytes_per_token(HIDDEN_SIZE, taps=True) + headers
    assert bytes_per_token(576, taps=True) == 5 + 32 * 6 + 3 * 576 * 2
    assert bytes_per_token(576, taps=False) == 5 + 32 * 6


def test_a_batch_is_what_was_written(made: tuple[Path, DataProgress], data: Data) -> None:
    asked = asked_in(made[0])
    numbers = [0, data.num_conversations - 1, 1]
    batch = data.read(numbers)
    assert {each.dtype for each in batch} == {torch.int64, torch.bool, torch.float32}
    for row, number in enumerate(numbers):
        length = data._length(number)
        assert not batch.answer[row, length:].any()
        assert (batch.top_ids[row, length:] == -1).all()
        predicting = batch.top_probs[row].sum(-1) > 0
        assert predicting[:-1].tolist() == batch.answer[row, 1:].tolist()
        assert batch.taps[row, :length].abs().sum(-1).min() > 0
        assert not batch.taps[row, length:].any()
        begin = int(batch.answer[row].int().argmax())
        assert begin > 5
        assert asked[number]["source"] in (USER, MODEL)
    assert batch.to("cpu").taps.shape == (3, batch.token_ids.shape[1], 3 * HIDDEN_SIZE)


def test_prompts_and_answers_belong_together(bundle: Bundle, made: tuple[Path, DataProgress], data: Data) -> None:
    """A greedy answer is of the likeliest tokens, a sampled one is not, and the prompt is the one that is named."""
    tokenizer = Tokenizer(bundle.tokenizer_path)
    for number, asked in enumerate(asked_in(made[0])):
        batch = data.read([number])
        begin = int(batch.answer[0].int().argmax())
        assert batch.token_ids[0, :begin].tolist() == tokenizer.encode_prompt(asked["prompt"])
        likeliest = bool((batch.top_ids[0, begin - 1 : -1, 0] == batch.token_ids[0, begin:]).all())
        assert likeliest == data._all[number][-1]


@pytest.mark.slow
def test_what_was_asked_before_is_not_asked_again(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a later shard of the same run, and in one that goes on."""
    asked = [DistillPrompt(f"Describe fox number {i} and nothing else?", MODEL) for i in range(40)]

    def make_up(*_: Any, new: Filter, **__: Any) -> list[DistillPrompt]:
        return [each for each in asked if new.takes(each)][:3]

    monkeypatch.setattr(answers_module, "make_prompts", make_up)
    for num_tokens in (1500, 2500):
        write(tmp_path, bundle, Recipe(num_tokens, seed=3, max_new_tokens=20, user_share=0.9))
    made = [each["prompt"] for each in asked_in(tmp_path)]
    assert len(find_shards(tmp_path)) == 3
    assert sum(each.content in made for each in asked) == 9
    assert len(set(made)) == len(made)


def test_what_is_late_ends_with_the_answers_that_were_begun(bundle: Bundle, tmp_path: Path) -> None:
    written = write(tmp_path, bundle, batch_size=4, is_late=lambda: True)
    assert 0 < written.num_tokens < RECIPE.num_tokens
    assert 1 <= written.num_conversations <= 4
    assert write(tmp_path, bundle, is_late=lambda: True).num_written == 0


@pytest.mark.slow
def test_what_was_killed_is_written_again_the_same(
    bundle: Bundle, made: tuple[Path, DataProgress], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill in the second shard, and then the third is there already when the second is written again."""
    monkeypatch.setattr(answers_module, "_TELL", 0.0)

    def kill(progress: DataProgress) -> None:
        if progress.num_tokens > 1300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, bundle, progress=kill)
    assert [each.name for each in find_shards(tmp_path)] == ["shard-00000"]
    (tmp_path / "unfinished-00001").mkdir()  # of a process that was killed and could not tidy up
    (tmp_path / "unfinished-00001" / "tokens.npy").write_bytes(b"half of it")
    again = write(tmp_path, bundle)
    assert again.num_tokens == made[1].num_tokens
    assert again.removed == made[1].removed
    assert contents(tmp_path) == contents(made[0])
    before = contents(tmp_path)
    assert write(tmp_path, bundle, batch_size=None).num_written == 0
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_more_tokens_go_on_from_those_that_are_there(
    bundle: Bundle, made: tuple[Path, DataProgress], tmp_path: Path
) -> None:
    less = Recipe(500, RECIPE.taps, seed=3, max_new_tokens=20, user_share=0.9)
    write(tmp_path, bundle, less)
    assert len(find_shards(tmp_path)) == 1
    write(tmp_path, bundle)
    assert contents(tmp_path) == contents(made[0])


def test_no_excluded_prompt_is_asked_and_none_twice(made: tuple[Path, DataProgress], data: Data) -> None:
    asked = [each["prompt"] for each in asked_in(made[0])]
    assert len(asked) == data.num_conversations == len(set(asked))
    assert not {each.content for each in EXCLUDED} & set(asked)
    assert sum(each in PROMPTS for each in asked) > 100


def test_half_of_the_answers_are_greedy(data: Data) -> None:
    greedy = [each[-1] for each in data._all]
    assert 0.4 < sum(greedy) / len(greedy) < 0.6


def test_held_out_conversations_are_not_trained_on(data: Data) -> None:
    every = set(range(data.num_conversations))
    trained = {i for epoch in range(3) for rows in data.batches(100, epoch) for i in rows}
    held_out = {i for rows in data.held_out(200, 10**6) for i in rows}
    assert held_out <= {i for i in every if i % 20 == 0}
    assert trained == {i for i in every if i % 20}
    assert held_out
    assert all(data._all[i][-1] for i in held_out)
    few = [i for rows in data.held_out(200, 100) for i in rows]
    assert sum(map(data._length, few[:-1])) < 100 + max(map(data._length, few))


def test_batches_are_as_large_as_they_may_be(data: Data) -> None:
    found = data.batches(400, seed=1)
    for rows in found:
        assert len(rows) * max(map(data._length, rows)) <= 400
    assert found == data.batches(400, seed=1)
    assert found != data.batches(400, seed=2)
    some = [{i for rows in data.batches(400, seed, share=0.1) for i in rows} for seed in (1, 2)]
    assert some[0] == some[1]
    assert len(some[0]) == round(0.1 * sum(map(len, found)))
    assert {i for rows in found for i in rows} > some[0]


def test_frequent_tokens_are_those_of_answers(data: Data) -> None:
    tokens = np.concatenate([shard["tokens"][shard["answer"]] for shard in data._shards])
    counts = np.bincount(tokens, minlength=448)
    found = data.frequent_tokens(20, 448)
    assert found.tolist() == sorted(found.tolist())
    assert counts[found].min() >= np.delete(counts, found).max()


@pytest.mark.slow
def test_refusals_and_loops_are_removed_and_counted(
    bundle: Bundle, made: tuple[Path, DataProgress], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(200, seed=3, max_new_tokens=40, user_share=1.0)
    texts: list[DistillText] = []
    write_texts = Writer.write

    def watched(self: Writer, *args: Any, **options: Any) -> Any:
        for text in write_texts(self, *args, **options):
            texts.append(text)
            yield text

    monkeypatch.setattr(Writer, "write", watched)
    monkeypatch.setattr(answers_module, "is_refusal", lambda answer: len(answer) % 5 == 0)
    monkeypatch.setattr(answers_module, "is_loop", lambda answer: len(set(answer)) < 8)
    progress = write(tmp_path, bundle, recipe)
    assert progress.removed["refusal"] > 1
    assert progress.removed["loop in an answer"] > 1
    lost = sum(progress.removed[each] for each in ("refusal", "loop in an answer"))
    lost += progress.removed.get("answer below 4 tokens", 0)
    assert progress.num_conversations == len(texts) - lost
    data = Data(tmp_path)
    assert not data.has_taps
    assert data.read([0]).taps is None
    assert data.hidden_size == 0
    monkeypatch.setattr(answers_module, "is_refusal", lambda _: True)
    with pytest.raises(ExportError, match=r"No answer of shard 0 can be kept \(.*refusal: \d+\)"):
        write(tmp_path / "none", bundle, recipe)
    assert not find_shards(tmp_path / "none")


def test_a_full_disk_is_said(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))  # type: ignore[attr-defined]
    with pytest.raises(ExportError, match=r"has 0\.00 GB of disk space left; the next shard may need 0\.01 GB"):
        write(tmp_path, bundle)


def test_a_shard_that_fails_leaves_nothing(tmp_path: Path) -> None:
    rows: dict[str, Any] = {
        "tokens": np.arange(5), "answer": np.arange(5) > 2,
        "top_ids": np.full((5, 32), -1), "top_probs": np.zeros((5, 32)), "taps": np.ones((5, 12)),
    }  # fmt: skip
    wrong = pytest.raises(ValueError, match=r"taps has the shape \(5, 12\), not \(5, 24\)")
    with wrong, Shard(tmp_path, 0, 8, taps=True) as shard:
        shard.add(Conversation("a", USER, greedy=True, rows=rows))
    assert not [*tmp_path.iterdir()]
    with Shard(tmp_path, 0, 4, taps=True) as shard:
        shard.add(Conversation("a", USER, greedy=True, rows=rows))
        shard.add(Conversation([{"role": "user", "content": "ä"}], USER, greedy=False, rows=rows))
        assert [each.name for each in tmp_path.iterdir()] == ["unfinished-00000"]
    data = Data(tmp_path)
    assert data.num_tokens == 10
    assert data.num_answer_tokens == 4
    assert data.read([1]).taps.shape == (1, 5, 12)
    (tmp_path / "shard-00001").mkdir()
    with pytest.raises(ExportError, match=r"shard-00001 is damaged: .*Delete it"):
        Data(tmp_path)
    with pytest.raises(ExportError, match="has no training data"):
        Data(tmp_path / "empty")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ExportError, match="cannot be written"), Shard(tmp_path / "file", 0, 4, taps=False):
        pass


def test_prompts_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("What is a fox?\n\n  Why? \n", encoding="utf-8")
    assert [each.content for each in read_prompts(tmp_path / "a.txt")] == ["What is a fox?", "Why?"]
    messages = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "What is a fox?"},
        {"role": "assistant", "content": "An animal."},
    ]
    lines = [{"prompt": "Why?"}, {"messages": messages}, {"id": 3, "turns": ["First.", "Second."]}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert [each.content for each in read_prompts(tmp_path / "b.jsonl")] == ["Why?", messages[:2], "First."]
    assert [each.content for each in texts_in(tmp_path / "b.jsonl")] == ["Why?", messages[:2], "First.", "Second."]
    assert DistillPrompt(messages).words == ["what", "is", "a", "fox"]
    for line, message in (
        ('{"prompt": 3}', "line 1, has no 'prompt', 'messages' or 'turns'"),
        ('{"messages": [{"role": "assistant", "content": "Hello"}]}', "has no 'prompt'"),
        ('{"messages": [3]}', "has no 'prompt'"),
        ("[]", "has no 'prompt'"),
        ('{"prompt', "line 1, cannot be read: it is no JSON"),
        ("", "has no prompts"),
    ):
        (tmp_path / "c.jsonl").write_text(line, encoding="utf-8")
        with pytest.raises(OptionError, match=message):
            read_prompts(tmp_path / "c.jsonl")
    with pytest.raises(OptionError, match=r"missing\.txt cannot be read: No such file"):
        read_prompts(tmp_path / "missing.txt")


def test_general_prompts_are_all_different() -> None:
    prompts = general_prompts()
    assert prompts == general_prompts()
    assert len({tuple(each.words) for each in prompts}) == len(prompts) == 2600
    assert not any("{" in str(each.content) for each in prompts)


def test_prompts_are_removed_by_reason() -> None:
    long = "Tell me all about the very large red fox that lives in the northern woods of"
    new = Filter([DistillPrompt("Who ARE you?")], known=[DistillPrompt(f"{long} Sweden")])
    assert not new.takes(DistillPrompt("who are you"))
    assert new.takes(DistillPrompt("What is a fox?"))
    assert not new.takes(DistillPrompt("What is a fox"))
    assert not new.takes(DistillPrompt("What is a... fox?", MODEL))
    assert new.takes(DistillPrompt(f"{long} Norway"))  # a user's prompts may begin alike
    assert not new.takes(DistillPrompt(f"{long} Finland", MODEL))
    assert new.removed == {"excluded prompt": 1, "duplicate prompt": 3}
    other = new.copy()
    assert not other.takes(DistillPrompt("What is a fox?"))
    assert other.takes(DistillPrompt("Where is the fox?"))
    assert new.takes(DistillPrompt("Where is the fox?"))
    assert other.removed == {"duplicate prompt": 1}
    assert not Filter([DistillPrompt(f"{long} Sweden")]).takes(DistillPrompt(f"{long} Finland", MODEL))
    fragments = Filter()
    assert not fragments.takes(DistillPrompt("Hi you", MODEL))
    assert not fragments.takes(DistillPrompt("yes yes no no yes yes", MODEL))
    assert fragments.takes(DistillPrompt("Hi you"))
    assert fragments.removed == {"fragment of a prompt": 1, "loop in a prompt": 1}


REFUSALS = (
    "I'm sorry, but I can't help with that.", " I\u2019m sorry, but I cannot do so", "Sorry, I can't write that",
    "As an AI language model, I do not have feelings", "I cannot provide a list", "I'm unable to access files",
    "Unfortunately, I don't know", "I apologize, but I was not made for this", "I don't have personal opinions",
)  # fmt: skip
ANSWERS = (
    "The fox says: I'm sorry, but I can't.", "Sorry means to regret.", "I can help with that.", "As a fox, I run.", "",
)  # fmt: skip


@pytest.mark.parametrize("answer", [*REFUSALS, *ANSWERS])
def test_refusals_are_told_from_answers(answer: str) -> None:
    assert is_refusal(answer) == (answer in REFUSALS)


@pytest.mark.slow
def test_the_model_makes_up_prompts(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each depends on the seed and its number alone, is one line, and is new."""
    # The tiny model's words are no words.
    monkeypatch.setattr("outrider_distill.prompts._fault", lambda text: "" if text else "nothing")
    writer = Writer(bundle, max_new_tokens=96, batch_size=8)
    made = make_prompts(writer, 12, seed=1, first=500, new=Filter())
    assert len(made) > 3
    assert made == make_prompts(writer, 12, seed=1, first=500, new=Filter())
    assert made != make_prompts(writer, 12, seed=2, first=500, new=Filter())
    texts = [str(each.content) for each in made]
    assert all("\n" not in each and each == each.strip() and each not in OPENINGS for each in texts)
    assert any(each.startswith(OPENINGS) for each in texts)
    assert {each.source for each in made} == {MODEL}
    others = make_prompts(writer, 12, seed=1, first=500, new=Filter(excluded=made))
    assert not set(texts) & {str(each.content) for each in others}


def test_follow_ups_are_about_earlier_answers() -> None:
    generator = np.random.default_rng(0)
    assert make_follow_ups([], 5, generator) == []
    found = make_follow_ups(["short", "The fox runs. " * 80], 40, generator)
    assert 5 < len(found) < 40
    assert all("The fox runs." in str(each.content) and len(str(each.content)) < 1000 for each in found)


@pytest.mark.slow
def test_a_model_without_a_chat_template_is_asked_the_users_prompts_alone(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.inputs.text.Tokenizer.has_chat_template", False)
    with pytest.raises(ExportError, match="All prompts are used: 180 prompts of yours gave"):
        write(tmp_path / "few", bundle, Recipe(100_000, max_new_tokens=8))
    assert {each["source"] for each in asked_in(tmp_path / "few")} == {USER}
    with pytest.raises(ExportError, match=r"All prompts are used: 0 prompts"):
        write_data(tmp_path / "none", bundle, Recipe(100), batch_size=8)
