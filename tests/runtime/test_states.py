"""Models whose layers keep states, on OpenVINO: the same text and bits as plain decoding, whatever is rejected."""

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

import outrider
from calls import rows_of_call
from hybrids import KINDS, save_hybrid
from outrider.bundle import Bundle, Format, read_bundle
from outrider.bundle.hashes import list_files
from outrider.bundle.manifest import ModelEntry, StateKind, write_manifest
from outrider.decoding import prefix_check
from outrider.engine.chat import Chat
from outrider.models.backends.nodes import ints, parameter, result
from outrider.models.backends.paged_graph import connect_positions, to_paged_attention
from outrider.models.kv import LAST, NUM_FIXED, ROWS_PER_SEQUENCE, BlockPool, SequenceRows, StateRows
from outrider.models.kv.block_tree import Block
from outrider.models.kv.chunk_files import files_in
from outrider.models.tuning import setting
from outrider.models.tuning.measure.readings import compare_readings, compare_states
from outrider.models.tuning.model_spec import ModelSpec
from outrider.models.tuning.setting import settings_for
from outrider.testing import ToyTokenizer, save_toy_bundle
from outrider.testing.weights import LAYERS
from outrider.types import NO_DRAFT, Chunk, Draft, Drafter, Exactness, Prompt, RowRule
from outrider_bench.verify.cancelled import cancel_and_compare, known_answers
from outrider_bench.verify.certify import check_states
from toys import in_threads, load_toy, random_ids
from trees import Trees

OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "logprobs": 2}
SAMPLED: dict[str, Any] = {"temperature": 1.3, "seed": 4}


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[outrider.Engine]:
    bundle = save_hybrid(tmp_path_factory.mktemp(request.param) / "bundle", request.param)
    with load_toy(bundle, cache_size=0.02, tokenizer=ToyTokenizer(chat=True)) as made:
        yield made


@dataclass
class Foretold(Drafter):
    """Drafts the plain text's next tokens, with a wrong one at a place that changes from round to round."""

    texts: list[list[int]]
    length: int = 6
    num_assistant_tokens: int = 8
    places: set[int] = field(default_factory=set)
    round: int = 0

    def propose(self, requests: Any) -> list[Draft]:
        drafts = []
        for request in requests:
            read = request.sequence.token_ids
            text = next((each for each in self.texts if each[: len(read)] == read), [])
            draft = text[len(read) : len(read) + min(self.length, request.limit)]
            self.round += 1
            wrong = self.round % (self.length + 1)
            if wrong < len(draft):
                draft[wrong] = (draft[wrong] + 1) % 39
                self.places.add(wrong)
            drafts.append(Draft(draft) if draft else NO_DRAFT)
        return drafts


def answers_of(engine: outrider.Engine, prompts: list[list[int]], **options: Any) -> list[Any]:
    """The answers to some prompts, at the same time."""
    found: list[Any] = [None] * len(prompts)

    def ask(i: int) -> None:
        found[i] = engine.generate(prompts[i], **OPTIONS | options)

    in_threads(ask, range(len(prompts)))
    return found


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_rejected_at_every_place_leave_no_trace(engine: outrider.Engine, sampling: dict[str, Any]) -> None:
    """Alone and several at once; and nothing is read twice: each round reads the newest token and its draft."""
    prompts = [random_ids(i, 30 + 13 * i) for i in range(3)]
    plain = [engine.generate(each, drafter=None, **OPTIONS, **sampling) for each in prompts]
    drafter = Foretold([[*prompt, *each.token_ids] for prompt, each in zip(prompts, plain, strict=True)])
    name = f"foretold {len(sampling)}"
    engine.add_drafter(name, drafter)
    alone = [engine.generate(each, drafter=name, num_assistant_tokens=6, **OPTIONS, **sampling) for each in prompts]
    together = answers_of(engine, prompts, drafter=name, num_assistant_tokens=6, **sampling)
    for found in (alone, together):
        assert [each.token_ids for each in found] == [each.token_ids for each in plain]
        assert [each.logprobs for each in found] == [each.logprobs for each in plain]  # to the last bit
    assert drafter.places == set(range(6))
    assert sum(each.stats.num_accepted_tokens for each in alone) > 60


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("drafter", ["draft", "ngram", "suffix"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_drafters_do_not_show(engine: outrider.Engine, drafter: str, sampling: dict[str, Any]) -> None:
    """The draft model keeps states, too."""
    prompts = [random_ids(7 + i, 20 + 15 * i) * 2 for i in range(2)]
    plain = [engine.generate(each, drafter=None, **OPTIONS, **sampling) for each in prompts]
    found = answers_of(engine, prompts, drafter=drafter, num_assistant_tokens=5, **sampling)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert [each.logprobs for each in found] == [each.logprobs for each in plain]
    assert sum(each.stats.num_draft_tokens for each in found)


@pytest.mark.fast_cases(1)
def test_drafting_ahead_does_not_show(tmp_path: Path, engine: outrider.Engine) -> None:
    """A wrong guess is dropped from the draft model's states, back to the last token that was right."""
    prompts = [random_ids(80 + i, 30) for i in range(2)]
    options = OPTIONS | {"drafter": "draft", "num_assistant_tokens": 4}
    with load_toy(engine.bundle, cache_size=0.02, overlap=True) as ahead:
        found = [ahead.generate(each, **options) for each in prompts]
    plain = [engine.generate(each, **OPTIONS | {"drafter": None}) for each in prompts]
    assert [each.logprobs for each in found] == [each.logprobs for each in plain]


def test_cached_prefixes_are_checked(engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a fresh reading, while the engine has nothing to do."""
    monkeypatch.setattr(prefix_check, "EVERY_HITS", 1)
    prompt, check = random_ids(90, 60), engine._queue._scheduler.prefix_check
    before = check.num_checked
    for _ in range(3):
        engine.generate(prompt, max_new_tokens=2, drafter=None)
        engine.settle()
    assert (check.num_checked - before, check.num_wrong) == (2, 0)


def test_a_draft_model_reads_nothing_twice(engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes back to the last accepted token by its rows, and reads what was decided after it."""
    backend: Any = engine.draft_models["draft"].backend
    read: list[int] = []
    submit = type(backend)._submit

    def counting(self: Any, chunks: Any) -> Any:
        if self is backend:
            read.extend(len(chunk.token_ids) for chunk in chunks)
        return submit(self, chunks)

    monkeypatch.setattr(type(backend), "_submit", counting)
    prompt = random_ids(21, 50)
    result = engine.generate(prompt, drafter="draft", num_assistant_tokens=4, **OPTIONS)
    num_drafts = result.stats.num_draft_tokens
    assert num_drafts
    assert sum(read) <= len(prompt) + num_drafts + 2 * len(result.token_ids)


def test_trees_leave_the_text_as_it_is(engine: outrider.Engine) -> None:
    samplings: list[dict[str, Any]] = [{}, SAMPLED]
    for number, sampling in enumerate(samplings):
        prompt = random_ids(30 + number, 29 + number)
        plain = engine.generate(prompt, drafter=None, **OPTIONS, **sampling)
        drafter = Trees([*prompt, *plain.token_ids], np.random.default_rng(number))
        engine.add_drafter(f"trees {number}", drafter)
        drafted = engine.generate(prompt, drafter=f"trees {number}", num_assistant_tokens=8, **OPTIONS, **sampling)
        assert drafted.token_ids == plain.token_ids
        assert drafted.logprobs == plain.logprobs
        assert len(drafter.shapes) > 2
        assert drafted.stats.num_accepted_tokens > 8
    assert (engine.cache["main"].num_used_rows, engine.cache["main"].num_used_tokens) == (0, 0)


def test_it_is_read_in_any_pieces_with_the_same_bits(engine: outrider.Engine) -> None:
    """As the certificate has it: in pieces, beside others, from the cache, with wrong drafts."""
    found = compare_readings(engine.main, 150)
    assert len(found) > 12
    found |= compare_states(engine.main, 150)
    assert set(found.values()) == {0.0}


def test_the_certificate_notices_a_state_of_another_length(
    engine: outrider.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a sequence goes on from an earlier row than its own."""
    own = SequenceRows.plan

    def earlier(self: SequenceRows, past: int, *args: int) -> Any:
        call = own(self, past, *args)
        before = [length for length in self._rows if length < past]
        return replace(call, row=self._rows[before[-1]] if before else call.row)

    assert check_states(engine.main, 64).passed
    monkeypatch.setattr(SequenceRows, "plan", earlier)
    check = check_states(engine.main, 64)
    assert not check.passed
    assert "logits differ by up to" in check.detail
    wrong = {name.split()[0] for name, difference in check.figures["largest_difference"].items() if difference}
    assert wrong == {"a", "1", "4", "8"}  # prompts that are cut, and rejected drafts


def test_dummy_rows_change_no_bit_and_most_states_leave_them_out(engine: outrider.Engine) -> None:
    backend: Any = engine.main
    known, found = backend.exactness, set()
    with closing(backend.open(64)) as slot:
        backend.submit([Chunk(slot, random_ids(6, 40), 0)]).wait()
        for num_dummies in (2, 5, 8):
            backend.use(Exactness(rule=RowRule(separate=True, dummy_rows=num_dummies)))
            chunk = Chunk(slot, [5], 1, generated=True)
            inputs, _ = backend._inputs_of([chunk])
            assert len(inputs["input_ids"]) == 1 + num_dummies
            is_ssm = "selective_ssm" in engine.bundle.manifest.main.geometry.layer_states
            assert inputs["la.subsequence_begins"].tolist() == ([0, 1, 1 + num_dummies] if is_ssm else [0, 1])
            found.add(rows_of_call(backend, chunk).tobytes())
            slot.trim(40)
    backend.use(known)
    assert len(found) == 1


def test_a_call_without_tokens_keeps_no_row(engine: outrider.Engine) -> None:
    main: Any = engine.main
    slot = main.open(40)
    for count in (3, 0, 2):
        main.submit([Chunk(slot, [1] * count, 0)]).wait()
    slot.close()
    assert main.cache.num_used_rows == 0


def test_conversations_go_on_where_their_last_turn_ended(engine: outrider.Engine) -> None:
    """Turns, the same prompt again, and others with the same beginning: read is what is new, and a few tokens."""
    system = random_ids(40, 100)
    plain = [random_ids(41, 5), random_ids(42, 9), random_ids(43, 30)]
    texts = [[*system, *each] for each in plain]
    for i, text in enumerate(texts):
        fresh = engine.generate(text, drafter="ngram", **OPTIONS)
        # The second one finds out where the system prompt ends, for the third one.
        num_cached = fresh.stats.num_cached_tokens
        assert num_cached == len(system) if i == 2 else num_cached < len(system)
        engine.settle()
        assert engine.generate(text, drafter="ngram", **OPTIONS).stats.num_cached_tokens >= len(system)
        again = engine.generate(text, drafter=None, **OPTIONS)
        assert again.logprobs == fresh.logprobs
        turn = [*text, *fresh.token_ids, *random_ids(44, 6)]
        found = engine.generate(turn, drafter=None, **OPTIONS)
        assert found.stats.num_cached_tokens == len(turn) - 6 - 1
        engine.main.clear_prefixes() if i == 2 else None
    engine.settle()
    engine.main.clear_prefixes()
    assert engine.generate(turn, drafter=None, **OPTIONS).logprobs == found.logprobs  # read as a whole
    assert engine.cache["main"].num_published_rows


def test_a_prompt_has_rows_after_its_opening_and_before_its_end(engine: outrider.Engine) -> None:
    """In one call, which stores few others. The same prompt again, and another with this opening, go on from there."""
    prompt = Prompt(random_ids(85, 57), opening=23)
    first = engine.generate(prompt, drafter=None, **OPTIONS)
    again = engine.generate(prompt, drafter=None, **OPTIONS)
    assert (again.logprobs, again.stats.num_cached_tokens) == (first.logprobs, 56)
    other = [*prompt.token_ids[:23], *random_ids(86, 20)]
    found = engine.generate(other, drafter=None, **OPTIONS)
    assert found.stats.num_cached_tokens == 23
    engine.settle()
    engine.main.clear_prefixes()
    assert engine.generate(other, drafter=None, **OPTIONS).logprobs == found.logprobs


@pytest.mark.parametrize(
    ("past", "branch", "count", "lengths"),
    [(0, 23, 57, (23, 56, 57)), (0, 50, 57, (50, 57)), (40, 43, 57, (43, 96, 97)), (100, 23, 57, (156, 157))],
)
def test_a_call_stores_what_prompts_start_from(past: int, branch: int, count: int, lengths: tuple[int, ...]) -> None:
    held = StateRows(40, spacing=256).open(past)
    held.branch = branch
    call = held.plan(past, count, *held.interval_of(past, count, 1, generated=False))
    assert call.lengths == lengths
    stored = [n + 1 for n in range(count) if (call.past + n + 1) % call.interval == 0 or n + 1 == count]
    assert [past + each for each in stored] == [*lengths]


@pytest.mark.slow
def test_the_prefix_store_has_the_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart the same prompt, the next turn and a text with the same beginning go on from files.

    States are of no use where there is no memory for all the keys and values before them.
    """
    bundle = save_hybrid(tmp_path / "bundle", "ssm")
    system, options = random_ids(70, 200), OPTIONS | {"drafter": "ngram"}
    texts = [[*system, i, *random_ids(71 + i, 20)] for i in range(3)]
    with load_toy(bundle, enable_prefix_caching=False) as plain:
        expected = [plain.generate(each, **options) for each in texts]
        turn = Prompt([*texts[0], *expected[0].token_ids, 1, 2, 3], answers=((len(texts[0]), len(texts[0]) + 40),))
        after = plain.generate(turn, **options)
    store: dict[str, Any] = {"prefix_store": str(tmp_path / "store")}
    with load_toy(bundle, **store) as engine:
        assert [engine.generate(each, **options).logprobs for each in texts[:2]] == [e.logprobs for e in expected[:2]]
    with load_toy(bundle, **store) as engine:
        found = [engine.generate(each, **options) for each in texts]
        assert [each.logprobs for each in found] == [each.logprobs for each in expected]
        nums_cached = [each.stats.num_cached_tokens for each in found]
        assert nums_cached[0] == 220
        assert min(nums_cached) >= len(system)
        turned = engine.generate(turn, **options)
    assert turned.logprobs == after.logprobs
    assert turned.stats.num_cached_tokens == len(turn.token_ids) - 4
    of_states = [file.size for file in files_in(tmp_path / "store") if b'"is_state":true' in file.path.read_bytes()]
    monkeypatch.setattr("outrider.models.kv.prefix_store._MOST_FETCHED", max(of_states))
    with load_toy(bundle, **store) as engine:
        found = [engine.generate(texts[0], **options)]
    assert (found[0].logprobs, found[0].stats.num_cached_tokens) == (expected[0].logprobs, 0)


@pytest.mark.slow
def test_states_that_are_found_later_are_saved_too(tmp_path: Path) -> None:
    """Where texts part within a piece that has a file; a damaged file of states is left out."""
    bundle, options = save_hybrid(tmp_path / "bundle", "conv"), OPTIONS | {"drafter": None}
    system = random_ids(75, 100)
    texts = [[*system, i, *random_ids(76 + i, 60)] for i in range(3)]
    store: dict[str, Any] = {"prefix_store": str(tmp_path / "store")}
    with load_toy(bundle, **store) as engine:
        expected = engine.generate(texts[2], **options)
        engine.main.clear_prefixes()
    for i in range(2):  # of the first, files have no states after the system prompt
        with load_toy(bundle, **store) as engine:
            engine.generate(texts[i], **options)
    for num_cached in (100, 0):
        with load_toy(bundle, **store) as engine:
            found = engine.generate([*system, 9, *texts[2][101:]], **options | {"max_new_tokens": 1})
            assert found.stats.num_cached_tokens == num_cached
            assert engine.generate(texts[2], **options).logprobs == expected.logprobs
        for file in files_in(tmp_path / "store"):
            if b'"is_state":true' in file.path.read_bytes():
                file.path.write_bytes(file.path.read_bytes()[:-1])


def test_answers_after_cancelled_ones_are_plain_decoding_s(engine: outrider.Engine) -> None:
    prompts = [random_ids(1, 90), random_ids(1, 70) + random_ids(2, 9), random_ids(3, 200), random_ids(4, 20)]
    known = known_answers(engine, prompts, max_new_tokens=12, ignore_eos=True)
    drafters = ["draft", "suffix", "auto", None]
    assert cancel_and_compare(engine, known, drafters, 12, 1, max_new_tokens=12, ignore_eos=True) == []
    engine.settle()
    assert engine.cache["main"].num_used_rows == 0


def asked(chat: Any, text: str, new: int = 0) -> int:
    """The tokens of a turn's prompt that were read again. new: of the prompt besides those of the last turn."""
    before = len(chat.turns[-1].token_ids) if chat.turns else 0
    stats = chat.send(text, max_new_tokens=8, ignore_eos=True, drafter="ngram").stats
    return int(stats.num_prompt_tokens - stats.num_cached_tokens - (new or stats.num_prompt_tokens - before))


def save_states(engine: outrider.Engine) -> None:
    """Give the store's thread time to find out what to copy, and the engine's to copy it."""
    for _ in range(2):
        time.sleep(0.1)
        engine.settle()


def test_nothing_is_read_again_of_system_prompts_and_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far apart a long prompt's rows are; from memory and from files, and after a prompt that was cancelled."""
    monkeypatch.setattr("outrider.models.backends.paged_cache.tokens_per_row", lambda *_: 10_000)
    bundle, system = save_hybrid(tmp_path / "bundle", "gdn"), "abcdefgh ijk" * 30
    options: dict[str, Any] = {"tokenizer": ToyTokenizer(chat=True), "cache_size": 0.05}
    options["prefix_store"] = str(tmp_path / "store")
    saved = []
    with load_toy(bundle, **options) as engine:
        cancel = Event()
        cancel.set()
        engine.generate([{"role": "system", "content": system}, {"role": "user", "content": "x"}], cancel=cancel)
        for i in range(3):
            chat = engine.chat(system)
            first = asked(chat, f"{'abc'[i]} de", 1)
            assert first > len(system) if i == 0 else first < 16  # the message and what the template writes
            for _ in range(2):
                save_states(engine)  # before the next turn replaces them
                assert asked(chat, "fgh") == 1
            save_states(engine)
            saved.append(chat)
        with pytest.raises(outrider.RequestError, match="opening=-1 is no number of tokens. Give how many"):
            Prompt([1, 2], opening=-1)
        server = [{"role": "system", "content": system}, {"role": "user", "content": "zz"}]
        found = engine.generate(server, max_new_tokens=1)
        assert found.stats.num_cached_tokens > len(system)
    with load_toy(bundle, **options) as engine:
        for chat in saved:
            again = Chat(engine, system, turns=chat.turns)
            assert asked(again, "ijk") <= 1
            again.rewind(2)
            assert asked(again.fork(), "klm") <= 32  # so few are not worth a file
        assert asked(engine.chat(system), "other", 1) < 16


@pytest.mark.slow
def test_few_rows_are_enough(tmp_path: Path) -> None:
    """With rows for one sequence only: others wait, drafts are read again, and the text is the same."""
    with load_toy(save_hybrid(tmp_path / "bundle", "gdn"), cache_size=0.02) as plain:
        prompts = [random_ids(50 + i, 40) for i in range(3)]
        expected = answers_of(plain, prompts, drafter=None)
        main: Any = plain.main
        main.allocate(8 * main.block_size)
        assert main.cache.num_rows == 8
        first = main.open(10)
        assert main.open(10) is None
        first.close()
        drafter = Foretold([[*p, *each.token_ids] for p, each in zip(prompts, expected, strict=True)], length=8)
        plain.add_drafter("foretold", drafter)
        found = answers_of(plain, prompts, drafter="foretold", num_assistant_tokens=8)
        assert [each.logprobs for each in found] == [each.logprobs for each in expected]


def test_a_cache_without_room_for_rows_says_what_to_raise(tmp_path: Path) -> None:
    bundle = save_hybrid(tmp_path / "bundle", "ssm")
    with pytest.raises(outrider.OptionError, match=r"an engine needs room for .* Raise cache_size to at least"):
        load_toy(bundle, cache_size=0.00005)


def block_after(parent: Block | None = None) -> Block:
    """A published block of ten tokens."""
    return Block(0, tuple(range(10)), parent)


def test_the_row_that_saves_the_least_goes_first() -> None:
    """By how many tokens it saves, and how long ago it was used."""
    rows, block = StateRows(NUM_FIXED + ROWS_PER_SEQUENCE + 3, spacing=1), block_after()
    held = rows.open(0)
    for length, parent in ((8, None), (9, None), (20, block)):
        call = held.plan(held.length, length - held.length, 1 << 30)
        held.store(call)
        held.mark(length)
        held.publish(block if parent is None else block_after(parent), 0 if parent is None else 10, 10)
    held.close()
    assert (rows.num_idle, rows.num_used) == (3, 0)
    other = rows.open(0)
    assert len(rows.take(rows.capacity - 2, other)) == rows.capacity - 2
    assert sorted(block.rows) == [8]  # the row of 9 tokens saves one


def test_ends_that_no_text_can_go_on_from_are_evicted_first() -> None:
    """A block without a row of states saves nothing. Rows of the text that was used last are kept."""
    rows = StateRows(NUM_FIXED + 3 * ROWS_PER_SEQUENCE, spacing=1)
    pool = BlockPool(11, 3, rows=rows)

    def read(token_ids: list[int], ends: list[int]) -> int:
        table = pool.open(len(token_ids), token_ids)
        assert table is not None
        assert table.rows is not None
        num_cached = table.num_cached
        for end in ends:
            table.rows.store(table.rows.plan(table.rows.length, end - table.rows.length, LAST))
            table.rows.mark(end)
        table.close(token_ids)
        return num_cached

    oldest, old, new, other = [7] * 6, [1] * 9, [2] * 9, [3] * 9
    read(oldest, [6])
    read(old, [6, 9])
    read(new, [4])  # the rest was cancelled: its third block has no row
    read(other[:6], [6])
    assert read(other, [9]) == 6  # a third block, of the new text
    assert pool.num_evicted == 0
    assert read([4] * 3, [3]) == 0
    assert pool.num_evicted == 1
    assert sorted(pool.row_ends(old)) == [6, 9]
    assert pool.row_ends(new) == [4]
    while 9 in pool.row_ends(old):
        rows._evict()  # rows are scarce: now the end of the old text saves nothing, either
    assert read([5] * 3, [3]) == 0
    assert len(pool.blocks_of(old[:6]) or ()) == 2
    assert pool.blocks_of(old) is None
    assert pool.row_ends(oldest) == [6]


def test_rows_that_must_not_be_written_are_found_before_the_call() -> None:
    """A number beyond the table would overwrite other memory of the process."""
    rows, block = StateRows(20, spacing=1), block_after()
    held = rows.open(0)
    call = held.plan(0, 3, 1)
    rows.check([call])
    with pytest.raises(AssertionError, match="row .* would be written"):
        rows.check([call, call])
    held.store(call)
    held.mark(2)
    held.publish(block, 0, 10)
    with pytest.raises(AssertionError, match="published or shared"):
        rows.check([call])
    for row in (20, -1):
        with pytest.raises(AssertionError, match="of 20"):
            rows.check([type(call)(row, 0, 1, (1,), (5,))])
        with pytest.raises(AssertionError, match="of 20"):
            rows.check([type(call)(0, 0, 1, (1,), (row,))])


def test_prompts_and_drafts_in_one_call(engine: outrider.Engine) -> None:
    """A short piece of a prompt is padded, beside answers: padding goes through no sequence's state."""
    main: Any = engine.main
    texts = [random_ids(60 + i, 40) for i in range(3)]
    slots = [main.open(80, Prompt(())) for _ in texts]
    for slot, text in zip(slots, texts, strict=True):
        main.submit([Chunk(slot, text[:20], 0)]).wait()
    rows: list[list[bytes]] = [[], [], []]
    for begin in range(20, 40):
        chunks = [
            Chunk(slots[0], texts[0][begin : begin + 1], 1),
            Chunk(slots[1], [texts[1][begin], 3, 4], 3, generated=True),
            Chunk(slots[2], texts[2][begin : begin + 1], 1),
        ]
        step = main.submit(chunks).wait()
        for i, chunk in enumerate(chunks):
            rows[i].append(step.rows(chunk)[0].full().tobytes())
        slots[1].trim(begin + 1)
    for i, text in enumerate(texts):
        with_one = main.open(80, Prompt(()))
        main.submit([Chunk(with_one, text[:20], 0)]).wait()
        alone = rows_of_call(main, Chunk(with_one, text[20:], 20, generated=i == 1))
        assert [row.tobytes() for row in alone] == rows[i]
        with_one.close()
    for slot in slots:
        slot.close()


def test_answers_are_scored_as_they_were_generated(engine: outrider.Engine) -> None:
    prompt = random_ids(90, 30)
    plain = engine.generate(prompt, drafter=None, **OPTIONS)
    wanted = [each.logprob for each in plain.logprobs or ()]
    assert len(wanted) == 40
    assert engine.score(prompt, plain.token_ids) == wanted


@pytest.mark.slow
def test_a_draft_model_with_states_drafts_for_a_model_without_in_onnx(tmp_path: Path) -> None:
    hybrid = save_hybrid(tmp_path / "hybrid", "gdn").manifest.drafters[0]
    bundle = save_toy_bundle(tmp_path / "dense", formats=("onnx", "openvino"), padded=False)
    shutil.copytree(tmp_path / "hybrid" / hybrid.model.folder, bundle.folder / "with_states")
    drafter = msgspec.structs.replace(hybrid, model=msgspec.structs.replace(hybrid.model, folder="with_states"))
    write_manifest(
        bundle.folder,
        msgspec.structs.replace(bundle.manifest, drafters=(drafter,), files=list_files(bundle.folder)),
    )
    with load_toy(read_bundle(bundle.folder)) as engine:
        prompts = [random_ids(91 + i, 30) for i in range(2)]
        expected = answers_of(engine, prompts, drafter=None)
        found = answers_of(engine, prompts, drafter=hybrid.name, num_assistant_tokens=4)
    assert [each.logprobs for each in found] == [each.logprobs for each in expected]
    assert all(each.stats.num_draft_tokens > 20 for each in found)


@pytest.mark.parametrize(
    ("form", "device", "said"),
    [("onnx", "CPU", "in ONNX.*outrider export MODEL"), ("openvino", "NPU", "on an NPU.*main_device='CPU'")],
)
def test_other_libraries_and_devices_say_why_not(tmp_path: Path, form: Format, device: str, said: str) -> None:
    bundle = save_hybrid(tmp_path / "bundle", "conv")
    model = msgspec.structs.replace(bundle.manifest.main, format=form)
    spec = ModelSpec("main", bundle, model, device=device)
    with pytest.raises(outrider.BundleError, match=f"cannot be run {said}") as raised:
        spec.compile()
    assert "2 of its 4 layers keep a state" in str(raised.value)


def test_recurrent_states_are_kept_in_single_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others round the state at each store, so no draft could be exact. Short convolutions are measured."""
    monkeypatch.setattr(setting, "limit_on", lambda name: None)
    monkeypatch.setattr(setting, "may_divide_by_zero", lambda *_: False)
    monkeypatch.setattr(setting, "new_core", lambda: SimpleNamespace(get_property=lambda *_: ["FP32", "BF16"]))
    for kind, precisions in (("conv", {"f32", "bf16"}), ("gdn", {"f32"}), ("ssm", {"f32"})):
        part = ModelSpec("main", *main_of(save_hybrid(tmp_path / kind, kind)))
        monkeypatch.setattr(ModelSpec, "is_small", False)
        assert {each.precision for each in settings_for(part)} == precisions


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_in_a_form_that_is_not_paged_is_named(kind: str, tmp_path: Path) -> None:
    bundle = save_hybrid(tmp_path / "bundle", kind)
    model = ov.Core().read_model(bundle.model_path(bundle.manifest.main))
    states = [
        node
        for node in model.get_ops()
        if node.get_type_name() == "ReadValue" and node.get_output_partial_shape(0)[2].is_static
    ]
    readers = list(states[-1].output(0).get_target_inputs())
    halved = ops.multiply(states[-1], ops.constant(np.float32(0.5)))
    for each in readers:
        each.replace_source_output(halved.output(0))
    with pytest.raises(outrider.BundleError, match=r"^The model keeps a state \[.*, in a form that OpenVINO does not"):
        to_paged_attention(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["halved", "swapped", "not stored"])
def test_a_graph_that_stores_something_else_in_a_state_is_refused(kind: str, change: str, tmp_path: Path) -> None:
    """OpenVINO drops what is stored without a look, so that the text would be that of another model."""
    bundle = save_hybrid(tmp_path / "bundle", kind)
    model = ov.Core().read_model(bundle.model_path(bundle.manifest.main))
    kept = [each for each in model.get_sinks() if "past_key_values" not in each.get_variable_id()]
    last, value = kept[-1], kept[-1].input_value(0)
    if change == "halved":
        last.input(0).replace_source_output(ops.multiply(value, ops.constant(np.float32(0.5))).output(0))
    elif change == "swapped":  # with the state of another layer of the same kind
        other = kept[len(kept) // 2 - 1]
        last.input(0).replace_source_output(other.input_value(0))
        other.input(0).replace_source_output(value)
    else:
        model.remove_sink(last)
    said = "nothing" if change == "not stored" else "what (Multiply|Slice|Reshape) makes"
    with pytest.raises(outrider.BundleError, match=f"^The model stores {said} in its state .* 'outrider export'") as e:
        to_paged_attention(model)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(("states", "said"), [
    (("selective_ssm", "") * LAYERS, r"keep selective_ssm \(layers 0, 2\), and its graph has short_convolution"),
    (("", "short_convolution") * LAYERS, r"keep short_convolution \(layers 1, 3\), .* \(layers 0, 2\)"),
    ((), r"keep no states, and its graph has short_convolution \(layers 0, 2\)\. .* 'outrider export'"),
])  # fmt: skip
def test_a_manifest_that_names_other_states_than_the_graph_s_is_refused(
    states: tuple[StateKind, ...], said: str, tmp_path: Path
) -> None:
    bundle = save_hybrid(tmp_path / "bundle", "conv")
    main = bundle.manifest.main
    geometry = msgspec.structs.replace(main.geometry, layer_states=states)
    changed = msgspec.structs.replace(bundle.manifest, main=msgspec.structs.replace(main, geometry=geometry))
    write_manifest(bundle.folder, changed)
    with pytest.raises(outrider.BundleError, match=said) as e:
        load_toy(read_bundle(bundle.folder))
    assert "\n" not in str(e.value)


def test_positions_that_a_graph_counts_itself_are_connected() -> None:
    """As in optimum-intel's export of Qwen3.5: with a paged cache they would be those of one row."""
    ids, positions = (parameter(name, ov.Type.i64, (-1, -1)) for name in ("input_ids", "position_ids"))
    count = ops.gather(ops.shape_of(ids), ops.constant(np.int64(1)), ops.constant(np.int64(0)))
    counted = ops.range(ops.constant(np.int64(0)), count, ops.constant(np.int64(1)), output_type="i64")
    sizes = ops.concat([ints(3), ops.shape_of(ids)], 0)
    planes = ops.broadcast(ops.reshape(counted, ints(1, 1, -1), special_zero=False), sizes, "BIDIRECTIONAL")
    model = ov.Model([result("planes", planes)], [ids, positions], "counts")
    connect_positions(model)
    given = {"input_ids": np.zeros((2, 3), np.int64), "position_ids": np.array([[4, 5, 6], [9, 10, 11]])}
    found = ov.Core().compile_model(model, "CPU")(given)[0]
    assert found.tolist() == [given["position_ids"].tolist()] * 3


def main_of(bundle: Bundle) -> tuple[Bundle, ModelEntry]:
    return bundle, bundle.manifest.main


def test_a_chat_goes_back_and_on(engine: outrider.Engine) -> None:
    """Retried, rewound and forked conversations have the text of a fresh one, and read little again."""

    def said(chat: Any, text: str) -> str:
        result = chat.send(text, max_new_tokens=12, ignore_eos=True, drafter="ngram")
        num_new = result.stats.num_prompt_tokens - result.stats.num_cached_tokens
        assert num_new <= (9 + len(text) if len(chat.turns) > 1 else 99)
        return str(result.text)

    chat = engine.chat()
    texts = [said(chat, text) for text in ("abc de f", "gh ij", "klm")]
    again = chat.retry(max_new_tokens=12, ignore_eos=True)
    assert (again.text, again.stats.num_cached_tokens) == (texts[2], again.stats.num_prompt_tokens - 1)
    other = chat.fork()
    chat.rewind(2)
    answers = [said(chat, "nop"), said(other, "q")]
    engine.main.clear_prefixes()
    fresh = engine.chat()
    for before, expected in (([], [("abc de f", texts[0]), ("nop", answers[0])]), ([1], [("gh ij", texts[1])])):
        if before:
            fresh.rewind()
        assert [said(fresh, text) for text, _ in expected] == [each for _, each in expected]
    assert [said(fresh, "klm"), said(fresh, "q")] == [texts[2], answers[1]]
