"""Models whose layers keep states, on OpenVINO: the same text and bits as plain decoding, whatever is rejected."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

import outrider
from calls import rows_of_call
from hybrids import KINDS, save_hybrid
from outrider.bundle import Format, read_bundle
from outrider.bundle.manifest import StateKind, write_manifest
from outrider.models.backends.nodes import ints, parameter, result
from outrider.models.backends.paged_graph import connect_positions, to_paged_attention
from outrider.models.backends.registry import compile_model
from outrider.models.kv import LAST, NUM_FIXED, ROWS_PER_SEQUENCE, BlockPool, StateRows
from outrider.models.kv.block_tree import Block
from outrider.models.kv.chunk_files import files_in
from outrider.models.tuning.measure.readings import compare_readings, compare_states
from outrider.models.tuning.model_spec import ModelSpec
from outrider.testing import ToyTokenizer
from outrider.testing.weights import LAYERS
from outrider.types import NO_DRAFT, Chunk, Draft, Drafter, Exactness, Prompt, RowRule
from outrider_bench.verify.cancelled import cancel_and_compare, known_answers
from toys import in_threads, load_toy, random_ids

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


def test_it_is_read_in_any_pieces_with_the_same_bits(engine: outrider.Engine) -> None:
    """As the certificate has it: in pieces, beside others, from the cache, with wrong drafts."""
    found = compare_readings(engine.main, 150)
    assert len(found) > 12
    found |= compare_states(engine.main, 150)
    assert set(found.values()) == {0.0}


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


def test_states_that_are_found_later_are_saved_too(tmp_path: Path) -> None:
    """Where texts part within a piece that has a file."""
    bundle, options = save_hybrid(tmp_path / "bundle", "conv"), OPTIONS | {"drafter": None, "max_new_tokens": 1}
    system = random_ids(75, 100)
    texts = [[*system, i, *random_ids(76 + i, 60)] for i in range(4)]
    for text in texts:  # of the first, files have no states after the system prompt
        with load_toy(bundle, prefix_store=str(tmp_path / "store")) as engine:
            num_cached = engine.generate(text, **options).stats.num_cached_tokens
    assert num_cached == 100


def test_answers_after_cancelled_ones_are_plain_decoding_s(engine: outrider.Engine) -> None:
    prompts = [random_ids(1, 90), random_ids(1, 70) + random_ids(2, 9), random_ids(3, 200), random_ids(4, 20)]
    known = known_answers(engine, prompts, max_new_tokens=12, ignore_eos=True)
    drafters = ["draft", "suffix", "auto", None]
    assert cancel_and_compare(engine, known, drafters, 12, 1, max_new_tokens=12, ignore_eos=True) == []
    engine.settle()
    assert engine.cache["main"].num_used_rows == 0


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
    """A block without a row of states saves nothing."""
    pool = BlockPool(5, 3, rows=StateRows(NUM_FIXED + 3 * ROWS_PER_SEQUENCE, spacing=1))
    for token_ids, end in (([1] * 6, 6), ([2] * 9, 4), ([3] * 3, 3)):  # no row is in the second one's last block
        table = pool.open(len(token_ids), token_ids)
        assert table is not None
        assert table.rows is not None
        table.rows.store(table.rows.plan(0, end, LAST))
        table.rows.mark(end)
        table.close(token_ids)
    assert pool.num_evicted == 1
    assert len(pool.blocks_of([1] * 6) or ()) == 2
    assert pool.blocks_of([2] * 9) is None


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


def test_answers_are_scored_as_they_were_generated(engine: outrider.Engine) -> None:
    prompt = random_ids(90, 30)
    plain = engine.generate(prompt, drafter=None, **OPTIONS)
    wanted = [each.logprob for each in plain.logprobs or ()]
    assert len(wanted) == 40
    assert engine.score(prompt, plain.token_ids) == wanted


@pytest.mark.parametrize(
    ("form", "device", "said"),
    [("onnx", "CPU", "in ONNX.*outrider export MODEL"), ("openvino", "NPU", "on an NPU.*main_device='CPU'")],
)
def test_other_libraries_and_devices_say_why_not(tmp_path: Path, form: Format, device: str, said: str) -> None:
    bundle = save_hybrid(tmp_path / "bundle", "conv")
    model = msgspec.structs.replace(bundle.manifest.main, format=form)
    spec = ModelSpec("main", bundle, model, device=device)
    with pytest.raises(outrider.BundleError, match=f"cannot be run {said}") as raised:
        compile_model(spec)
    assert "2 of its 4 layers keep a state" in str(raised.value)


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
