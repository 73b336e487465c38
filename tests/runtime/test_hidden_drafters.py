"""Drafters that read hidden states get those of the right tokens, in every call, whatever became of earlier drafts.

The heads are fakes whose drafts change with every row that they have read (`FakeHead`). So each draft is compared with
one made from scratch, from the committed tokens and the main model's hidden states of these.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import in_the_loop
from in_the_loop import InTurns, new_request
from outrider.config import GenerationConfig
from outrider.decoding.answer import Answer
from outrider.decoding.loop import step
from outrider.decoding.row_budget import RowBudget
from outrider.decoding.scheduler import Scheduler
from outrider.decoding.slots import admit, release
from outrider.drafters import HiddenModel, MarkovHead, hidden_model
from outrider.drafters.controller import Fixed
from outrider.drafters.draft_state import DraftState
from outrider.testing import FakeBackend, FakeHead, FakeSlot
from outrider.tokens.sampling import LogitsSampler
from outrider.tokens.verifiers import BlockRejection, TokenRejection
from outrider.types import Committed, Draft, DraftRequest, Noise, TokenSequence
from outrider_bench.verify.exact import chi_square_p_value

VOCAB_SIZE = 3  # a third of all draft tokens are right
WIDTH = FakeBackend.width
MASKS = [2, 2, 2]
KINDS = ("module", "wide module", "block", "corrected block")
FEATURES = {"wide module": ("early", "late"), "block": ("late", "early")}
RANK = 2


def markov_head() -> MarkovHead:
    """One with a memory."""
    rng = np.random.default_rng(0)
    before, after = rng.standard_normal((2, VOCAB_SIZE, RANK)).astype("f4")
    joint = rng.standard_normal((3 * RANK, 2 * RANK)).astype("f4")
    return MarkovHead(VOCAB_SIZE, cast("Any", before), cast("Any", after), joint)


class Checked(HiddenModel):
    """Compares each draft with one that is made from scratch."""

    main: FakeBackend
    kind: str

    @classmethod
    def of(cls, main: FakeBackend, kind: str, seed: int = 0, **options: Any) -> "Checked":
        features = FEATURES.get(kind, ("late",))
        width, own = WIDTH * len(features), 3 if kind == "wide module" else WIDTH
        options = {"context_length": 2000, **options}
        if "module" in kind:
            both = width if width == own else width + own
            backend = FakeHead(VOCAB_SIZE, "module", hidden_width=both, own_width=own, seed=seed)
            made = cls.module(backend, features, both, **options)
        else:
            markov = markov_head() if kind == "corrected block" else None
            own = 3 * RANK if markov else 0
            backend = FakeHead(VOCAB_SIZE, "block", hidden_width=width, own_width=own, seed=seed)
            made = cls.block(backend, features, MASKS, markov, **options)
        checked = cast("Checked", made)
        checked.main, checked.kind = main, kind
        checked.ids, checked.positions, checked.known = defaultdict(list), {}, {}
        checked.begun, checked.inexact = Counter(), set()
        checked.num_drafts = checked.num_empty = 0
        return checked

    ids: defaultdict[TokenSequence, list[int]]
    positions: dict[TokenSequence, int]  # of the first hidden states that the main model gives
    known: dict[TokenSequence, list[tuple[int, int]]]  # a sequence's entries that were in the cache at its begin
    begun: Counter[str]  # how sequences began
    inexact: set[int]  # rows that were read beside the token before their own
    num_drafts: int
    num_empty: int

    @property
    def head(self) -> FakeHead:
        return cast("FakeHead", self.backend)

    @property
    def shift(self) -> int:
        return int("module" in self.kind)

    def row_of(self, token_ids: Sequence[int], i: int) -> Any:
        """The main model's hidden states of token i, in their place of the head's input."""
        row = np.concatenate(
            [self.main.features_after(token_ids[: i + 1], name) for name in self.requirements.features]
        )
        return np.pad(row, (0, self.head.hidden_width - len(row)))

    def id_of(self, sequence: TokenSequence, i: int) -> int:
        """What stands for the main model's hidden states of a committed token."""
        ids = self.ids[sequence]
        while len(ids) <= i:
            ids.append(self.head.row_id(self.row_of(sequence.token_ids, len(ids))))
        return ids[i]

    def entries(self, sequence: TokenSequence) -> list[tuple[int, int]]:
        """What the head's slot has to hold before a draft: tokens, and what stands for their hidden states."""
        token_ids, position = sequence.token_ids, self.positions[sequence]
        entries = [*self.known[sequence]]
        rows = [*range(position, len(token_ids) - 1)]
        first = position
        if len(entries) == position - 1:  # one behind: that token is read beside the next one's hidden states
            rows, first = [position, *rows], position - 1
        return entries + [(token_ids[i + self.shift], self.id_of(sequence, row)) for i, row in enumerate(rows, first)]

    def reserve(self, sequence: TokenSequence, max_tokens: int, num_cached: int = 0) -> bool:
        assert super().reserve(sequence, max_tokens, num_cached)
        slot = self.slot_of(sequence)
        self.positions[sequence] = num_cached
        self.known[sequence] = found = [*zip(slot.token_ids, slot.shifts, strict=True)]
        missing = num_cached - len(found)
        assert missing >= 0
        if num_cached:
            self.begun[("whole", "one behind")[missing] if missing < 2 else "far behind"] += 1
        for i, (token_id, row_id) in enumerate(found):
            assert token_id == sequence.token_ids[i + self.shift]
            assert row_id == self.id_of(sequence, i) or row_id in self.inexact
        if missing == 1:
            self.inexact.add(self.id_of(sequence, num_cached))
        return True

    def slot_of(self, sequence: TokenSequence) -> FakeSlot:
        return cast("FakeSlot", self._states[sequence].slot)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        unread = [self.num_unread(request.sequence) for request in requests]
        drafts = super().propose(requests)
        for request, draft, num_unread in zip(requests, drafts, unread, strict=True):
            fits = len(self.entries(request.sequence)) + request.limit <= self._context_length
            share = self.shares.get(request.sequence, 0)
            is_read = share > 0 and num_unread <= share
            expected = self.expected(request) if fits and is_read else []
            assert draft.token_ids == expected
            self.num_drafts += bool(expected)
            self.num_empty += not expected
        return drafts

    def _share(self, states: Sequence[DraftState]) -> list[int]:
        shares = super()._share(states)
        self.shares = {state.request.sequence: count for state, count in zip(states, shares, strict=True)}
        return shares

    def expected(self, request: DraftRequest) -> list[int]:
        """A greedy draft, from scratch."""
        sequence, head, drafted = request.sequence, self.head, list[int]()
        newest = sequence.token_ids[-1]
        token_ids, shifts = map(list, zip(*self.entries(sequence), strict=True))
        if self.kind == "corrected block":
            return self.corrected(token_ids, shifts, [newest, *MASKS[:-1]], request.limit)
        if self.kind == "block":
            rows = [head.logits_for(token_ids, shifts, [newest, *MASKS], place=i) for i in range(len(MASKS))]
            return [int(row.argmax()) for row in rows[: request.limit]]
        for _ in range(request.limit):
            drafted.append(int(head.logits_for(token_ids, shifts).argmax()))
            own = head.next_hidden(token_ids, shifts)
            token_ids.append(drafted[-1])
            shifts.append(head.row_id(np.pad(own, (head.hidden_width - len(own), 0))))
        return drafted

    def corrected(self, token_ids: list[int], shifts: list[int], block: list[int], limit: int) -> list[int]:
        """A block whose rows are corrected by the tokens before."""
        head, known, memory, drafted = markov_head(), self.head, np.zeros(RANK), [block[0]]
        before, after = cast("Any", head.before), cast("Any", head.after)
        for i in range(min(len(block), limit)):
            read = np.concatenate([memory, before[drafted[-1]]])
            gate, new, out = np.split(head.joint @ read + known.block_state(token_ids, shifts, block, place=i), 3)
            gate = 1 / (1 + np.exp(-gate))
            memory = gate * memory + (1 - gate) * np.tanh(new)
            logits = known.logits_for(token_ids, shifts, block, place=i) + after @ np.tanh(out)
            drafted.append(int(logits.argmax()))
        return drafted[1:]

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        super().observe(sequence, committed)
        slot = self.slot_of(sequence)  # nothing of a draft is left
        held = [*zip(slot.token_ids, slot.shifts, strict=True)]
        assert held == self.entries(sequence)[: len(held)]

    def release(self, sequence: TokenSequence) -> None:
        slot = self.slot_of(sequence)
        super().release(sequence)
        assert slot.closed
        assert sequence not in self._states


def make_request(prompt: Sequence[int], policy: Any, max_new_tokens: int = 16, scope: bytes = b"") -> Answer:
    sequence = TokenSequence([*prompt], len(prompt), scope=scope)
    return new_request(prompt, policy, sequence=sequence, max_new_tokens=max_new_tokens)


def run(main: FakeBackend, *requests: Answer, piece: int = 32) -> None:
    """Answer requests together; the text is that of plain decoding."""
    in_the_loop.run(main, *requests, rows=piece)
    for request in requests:
        token_ids = request.sequence.token_ids
        for i in range(request.sequence.num_prompt_tokens, len(token_ids)):
            assert token_ids[i] == int(main.logits_after(token_ids[:i]).argmax())


def new_main(seed: int = 0) -> FakeBackend:
    return FakeBackend(VOCAB_SIZE, seed=seed, features=("late", "early"))


tokens = st.integers(0, VOCAB_SIZE - 1)
short = st.lists(tokens, min_size=1, max_size=8)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    waves=st.lists(st.lists(st.tuples(st.integers(0, 40), short), min_size=1, max_size=3), min_size=1, max_size=3),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=2),
    order=st.lists(st.integers(0, 2), min_size=1, max_size=5).filter(any),
    piece=st.sampled_from([2, 7, 64]),
    most_kept=st.sampled_from([1, 6, 256]),
)
def test_every_draft_is_one_of_the_right_hidden_states(
    seed: int, waves: list[Any], kinds: list[str], order: list[int], piece: int, most_kept: int
) -> None:
    """Answers that begin with each other's text, together and one after another, with drafters that take turns."""
    main = new_main(seed)
    text: list[int] = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 40).tolist()
    drafters = [Checked.of(main, kind, i, max_num_batched_tokens=piece) for i, kind in enumerate(kinds)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden_model, "_MAX_KEPT_TOKENS", most_kept)
        for wave in waves:
            policy = InTurns(drafters, order)
            requests = [make_request([*text[:count], *own], policy) for count, own in wave]
            run(main, *requests, piece=piece)
            text = requests[0].sequence.token_ids


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_all_lengths_are_accepted_and_rejected(kind: str) -> None:
    main = new_main()
    drafter = Checked.of(main, kind)
    request = make_request([0, 1], InTurns([drafter], [1]), max_new_tokens=400)
    run(main, request)
    assert drafter.num_empty <= 1  # none is left out but that of the last token
    of_position = request.stats.num_accepted_tokens_per_position
    assert of_position[0] > of_position[1] > of_position[2] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_goes_on_finds_all_of_it_in_the_cache(kind: str) -> None:
    main = new_main()
    drafter = Checked.of(main, kind)
    policy = InTurns([drafter], [1])
    first = make_request([0, 1, 2, 2], policy)
    run(main, first)
    second = make_request([*first.sequence.token_ids, 1, 0], policy)
    run(main, second)
    assert second.stats.num_cached_tokens == len(first.sequence) - 1
    assert drafter.begun == {"whole": 1}
    read = sum(map(sum, drafter.head.calls))
    again = make_request([*first.sequence.token_ids, 1, 0], policy, max_new_tokens=2)
    run(main, again)
    assert sum(map(sum, drafter.head.calls)) - read < 10  # the prompt is not read again


def test_a_module_may_be_one_behind() -> None:
    """What it reads last in a prefix depends on the token after, which is another."""
    main = new_main()
    drafter = Checked.of(main, "module")
    policy = InTurns([drafter], [1])
    first = make_request([0, 1, 2, 2], policy)
    run(main, first)
    cut = first.sequence.token_ids[:8]
    second = make_request([*cut, (first.sequence.token_ids[8] + 1) % VOCAB_SIZE, 0], policy)
    run(main, second)
    assert second.stats.num_cached_tokens == 8
    assert drafter.begun == {"one behind": 1}
    assert drafter.num_empty <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_only_the_main_model_has_cached_is_left_out(kind: str) -> None:
    """The drafter that begins without a part of the text does not pass that on."""
    main = new_main()
    text = [0, 1, 2, 2] * 6  # what is left out looks like what is not
    run(main, make_request(text[:20], None, max_new_tokens=1))
    drafter = Checked.of(main, kind)
    for i in (1, 2):
        request = make_request(text, InTurns([drafter], [1]))
        run(main, request)
        assert request.stats.num_cached_tokens >= 20
        assert drafter.begun == {"far behind": i}
    assert not drafter.head.published
    assert drafter.num_drafts > 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [256, 257, 258, 600])
def test_of_long_prompts_little_is_kept(kind: str, length: int) -> None:
    """Their hidden states are read while the main model reads the prompt, and the first round has a draft."""
    main = new_main()
    drafter = Checked.of(main, kind, max_num_batched_tokens=100)
    prompt: list[int] = np.random.default_rng(0).integers(0, VOCAB_SIZE, length).tolist()
    request = make_request(prompt, InTurns([drafter], [1]))
    assert admit(request, main)
    most = 0
    while not request.ended:
        step(main, Scheduler(main, RowBudget(64), [request]))
        assert request.error is None
        most = max(most, drafter.num_unread(request.sequence))
    assert most <= 256
    if length > 256:
        assert not drafter.num_empty
    assert max(sum(call) for call in drafter.head.calls) <= 100 + len(MASKS) + 1
    release(request)


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_end_of_its_context_nothing_is_drafted_or_kept(kind: str) -> None:
    main = new_main()
    drafter = Checked.of(main, kind, context_length=40)
    policy = InTurns([drafter], [1])
    request = make_request([0, 1, 2] * 10, policy, max_new_tokens=60)
    run(main, request)
    assert drafter.num_drafts
    assert drafter.num_empty > 10
    long = make_request([2, 1, 2] * 200, policy, max_new_tokens=20)
    assert admit(long, main)
    while not long.ended:
        step(main, Scheduler(main, RowBudget(32), [long]))
        assert drafter.num_unread(long.sequence) < 40
    release(long)
    run(main, make_request(request.sequence.token_ids[:35], policy, max_new_tokens=3))
    assert drafter.begun["whole"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_with_another_first_token_or_scope_begins_anew(kind: str) -> None:
    main = new_main()
    drafter = Checked.of(main, kind)
    policy = InTurns([drafter], [1])
    text = [1, 2, 2, 1, 0, 1, 2]
    run(main, make_request([0, *text], policy, scope=b"1"))  # 1 and 0, not 10 or 01
    for first, scope in ((1, b"1"), (1, b"0"), (1, b""), (0, b""), (0, b"10"), (1, b"01")):
        run(main, make_request([first, *text], None, scope=scope))  # now the main model has them
        request = make_request([first, *text], policy, scope=scope)
        run(main, request)
        assert drafter.known[request.sequence] == []
    request = make_request([0, *text], policy, scope=b"1")
    run(main, request)
    assert len(drafter.known[request.sequence]) == request.stats.num_cached_tokens > 5


@pytest.mark.parametrize("kind", KINDS)
def test_without_reuse_nothing_is_published(kind: str) -> None:
    main = new_main()
    drafter = Checked.of(main, kind, reuse=False)
    for _ in range(2):
        run(main, make_request([0, 1, 2, 2, 1], InTurns([drafter], [1])))
    assert drafter.begun == {"far behind": 1}
    assert not drafter.head.published


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_the_drafter_had_no_part_in_costs_it_no_call(kind: str) -> None:
    main = new_main()
    drafter = Checked.of(main, kind)
    run(main, make_request([0, 1, 2, 2, 1], InTurns([drafter], [0])))
    assert not drafter.head.calls


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("verifier", [BlockRejection, TokenRejection])
def test_a_corrected_draft_that_is_drawn_changes_no_distribution(verifier: Any) -> None:
    """The first three tokens of 800 answers; a chi-square test that is wrong once in a million."""
    main = new_main()
    head = FakeHead(VOCAB_SIZE, "block", hidden_width=WIDTH, own_width=3 * RANK)
    drafter = HiddenModel.block(head, ("late",), MASKS, markov_head(), context_length=2000)
    counts: Counter[tuple[int, ...]] = Counter()
    num_accepted = 0
    for seed in range(800):
        request = make_request([0, 1, 2], Fixed(drafter), max_new_tokens=4)
        request.sampler = LogitsSampler(GenerationConfig(temperature=1.0), [0, 1, 2])
        in_the_loop.ask(request, verifier=verifier(), noise=Noise(seed))
        assert admit(request, main)
        while not request.ended:
            step(main, Scheduler(main, RowBudget(32), [request]))
        release(request)
        counts[tuple(request.sequence.generated_token_ids[:3])] += 1
        num_accepted += request.stats.num_accepted_tokens
    assert num_accepted > 200
    expected = dict.fromkeys(itertools.product(range(VOCAB_SIZE), repeat=3), 1.0)
    for token_ids in expected:
        for i, token_id in enumerate(token_ids):
            logits = main.logits_after([0, 1, 2, *token_ids[:i]]).astype(np.float64)
            expected[token_ids] *= np.exp(logits[token_id]) / np.exp(logits).sum()
    assert chi_square_p_value(counts, expected) > 1e-6
