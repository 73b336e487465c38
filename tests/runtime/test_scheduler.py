"""Rows of a round: answers never wait, prompts are read in order, and a round stays within its time."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from in_the_loop import new_request
from outrider.decoding.answer import Answer
from outrider.decoding.loop import step
from outrider.decoding.row_budget import (
    LEAST_PIECE_TOKENS,
    LEAST_PROMPT_ROWS,
    PIECE_SECONDS,
    SHORTEST_SHARE,
    SLOWDOWN_FACTOR,
    SMOOTH_ROUND_SECONDS,
    RowBudget,
)
from outrider.decoding.scheduler import Scheduler
from outrider.decoding.slots import admit, release
from outrider.drafters.controller import Fixed
from outrider.engine.scoring import give
from outrider.models.cost.table import CallCost
from outrider.testing import FakeBackend
from outrider.types import Committed, Draft, Drafter, DraftPolicy, DraftRequest, Rounding, RowRule, TokenSequence

VOCAB_SIZE = 6
RULES = (
    RowRule(),
    RowRule(sequence=Rounding(2)),
    RowRule(sequence=Rounding(8, 8), call=Rounding(8, 8)),
    RowRule(sequence=Rounding(32, 32), call=Rounding(32, 32)),
    RowRule(sequence=Rounding(2), call=Rounding(2), separate=True),
)
sizes = st.integers(1, 5000)


def cost_of(row: float, call: float = 0.01, rule: RowRule | None = None, of_context: float = 0.0) -> CallCost:
    """Seconds of a call: `call`, and `row` for each row, which grows by `of_context` for each token of context."""
    rows = (1, 8, 32)
    near, far = (tuple(call + n * (row + of_context * context) for n in rows) for context in (0, 2000))
    return CallCost(rows, near, far, (0, 2000), rule=rule or RowRule())


class Machine:
    """Runs the calls that a budget shares out. prompt_row: seconds of each row of a prompt, at no context."""

    def __init__(self, budget: RowBudget, cost: CallCost, prompt_row: float, of_context: float = 0.0) -> None:
        self.budget, self.cost = budget, replace(cost)
        self.prompt_row, self.of_context = prompt_row, of_context

    def round(self, answers: Sequence[int], left: list[int], read: list[int]) -> float:
        """Read one round of prompts, in place. Returns its seconds."""
        contexts = [100] * len(answers) + read
        counts = self.budget.share([*answers, *left], [True] * len(answers) + [False] * len(left), contexts)
        seconds = self.cost.together(answers, 100) if answers else 0.0
        for i, count in enumerate(counts[len(answers) :]):
            seconds += count * (self.prompt_row + self.of_context * read[i])
            left[i] -= count
            read[i] += count
        before = max((begin - count for begin, count in zip(read, counts[len(answers) :], strict=True)), default=0)
        assert self.budget._cost
        self.budget._cost.observe(answers, 100, seconds, prompt_rows=sum(counts[len(answers) :]), prompt_context=before)
        return seconds


@given(
    st.lists(st.tuples(sizes, st.booleans()), min_size=1, max_size=40),
    st.integers(32, 2000),
    st.sampled_from(RULES),
    st.one_of(st.just("auto"), st.floats(0.001, 1.0)),
    st.booleans(),
    st.floats(0, 1),
)
def test_one_budget_of_rows(
    requests: list[tuple[int, bool]], most: int, rule: RowRule, seconds: float | str, timed: bool, begun: float
) -> None:
    """Answers get all that they need, prompts what is left of it; and some prompt is read on, whatever is left."""
    wanted, decoding = [min(n, 16) if decodes else n for n, decodes in requests], [decodes for _, decodes in requests]
    budget = RowBudget(most, seconds, cost_of(0.001, rule=rule) if timed else None)
    counts = budget.share(wanted, decoding, [0] * len(wanted), begun=begun)
    answers = [count for count, decodes in zip(counts, decoding, strict=True) if decodes]
    pieces = [count for count, decodes in zip(counts, decoding, strict=True) if not decodes]
    assert answers == [count for count, decodes in zip(wanted, decoding, strict=True) if decodes]
    assert all(0 <= count <= n for count, n in zip(counts, wanted, strict=True))
    assert not pieces or any(pieces)
    padded = rule.sequence if timed else Rounding()
    of_answers = (rule.num_rows(answers) if timed else sum(answers)) if answers else 0
    least = padded(LEAST_PIECE_TOKENS)
    assert sum(padded(count) for count in pieces if count) <= max(most - of_answers, least)
    for count, n in zip(pieces, [n for n, decodes in zip(wanted, decoding, strict=True) if not decodes], strict=True):
        assert count == n or count % least == 0, "a piece is as long as the rule's padding allows"


@given(st.lists(sizes, min_size=1, max_size=12), st.integers(32, 2000))
def test_prompts_get_all_rows_if_nobody_decodes(prompts: list[int], most: int) -> None:
    """However short a round may be."""
    budget = RowBudget(most, 0.001, cost_of(1e-6, call=1e-4))
    pieces = budget.share(prompts, [False] * len(prompts), [0] * len(prompts))
    assert sum(prompts) == sum(pieces) or sum(pieces) >= min(most, 1024) - LEAST_PIECE_TOKENS * 2


@given(st.floats(1e-4, 0.1), st.sampled_from(RULES), st.floats(0.3, 3))
def test_a_piece_of_a_prompt_takes_half_a_second_at_most(row: float, rule: RowRule, slower: float) -> None:
    """No call is interrupted, so whoever cancels waits for its end. Learned from calls that take longer than measured.

    A piece is the least one, doubled some times.
    """
    cost, least = cost_of(row, call=0.0, rule=rule), rule.sequence(LEAST_PIECE_TOKENS)
    budget, sizes = RowBudget(100_000, "auto", cost), []
    for _ in range(40):
        (size,) = budget.share([1_000_000], [False], [0])
        cost.observe([], 0, size * slower * row, prompt_rows=size)
        sizes.append(size)
    assert all(size % least == 0 and (size // least).bit_count() == 1 for size in sizes)
    most = PIECE_SECONDS / (slower * row)
    assert sizes[-1] == least or most / 2.2 < sizes[-1] < 1.1 * most


@given(st.lists(st.tuples(sizes, st.integers(0, 60)), min_size=1, max_size=12), st.integers(64, 1000))
def test_every_prompt_is_read_within_its_bound(prompts: list[tuple[int, int]], most: int) -> None:
    """Behind those that came before it, or after as many tokens of every other as it has itself."""
    prompts = sorted(prompts, key=lambda prompt: prompt[1])
    budget, left = RowBudget(most), [size for size, _ in prompts]
    ended: dict[int, int] = {}
    for now in itertools.count():
        there = [i for i, (_, came) in enumerate(prompts) if came <= now and left[i]]
        if there:
            counts = budget.share([left[i] for i in there], [False] * len(there), [0] * len(there))
            for i, count in zip(there, counts, strict=True):
                left[i] -= count
                if not left[i]:
                    ended[i] = now
        if not any(left):
            break
    # Pieces are whole multiples of the least one: each prompt's end, and each round, may leave less than one unused.
    for i, (size, came) in enumerate(prompts):
        earlier = sum(n + LEAST_PIECE_TOKENS for n, _ in prompts[: i + 1])
        by_order = earlier / ((1 - SHORTEST_SHARE) * most - LEAST_PIECE_TOKENS)
        by_size = sum(min(n, size) + LEAST_PIECE_TOKENS for n, _ in prompts) / (SHORTEST_SHARE * most)
        assert ended[i] - came <= min(by_order, by_size) + 2


def test_prompts_are_read_in_calls_that_the_rule_allows() -> None:
    rule = RowRule(Rounding(2), separate=True, dummy_rows=2, most=112)
    budget = RowBudget(512, cost=cost_of(0.001, rule=rule))
    assert budget.share([500, 500], [False, False], [0, 0]) == [96, 0]
    assert sum(budget.share([3, 500], [True, False], [100, 0], limited=False)) <= rule.room == 110


def test_rows_that_short_prompts_leave_are_not_saved_up() -> None:
    budget = RowBudget(400)
    for _ in range(20):
        budget.share([4], [False], [0])
    _, shorter = budget.share([5000, 3000], [False, False], [0, 0])
    assert shorter <= SHORTEST_SHARE * 400 + LEAST_PIECE_TOKENS


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    counts = RowBudget(512).share([3000, 100], [False, False], [0, 0])
    assert counts[1] == 100
    assert counts[0] >= 512 - 128


@given(
    st.floats(1e-4, 0.01),
    st.floats(0.1, 1.0),
    st.floats(0, 3),
    st.integers(1, 31),
    st.sampled_from(RULES),
    st.one_of(st.just("auto"), st.floats(0.05, 0.5)),
    st.sampled_from([1.0, 0.25]),
)
def test_rounds_keep_to_their_time(
    row: float, share: float, growth: float, num_answers: int, rule: RowRule, most: float | str, part: float
) -> None:
    """Whatever a prompt's row really takes, from a tenth of what was measured, and as it grows with the context.

    The second prompt begins where its context is long: most of it was in the prefix cache. Its first piece is estimated
    from calls at short contexts, and may take half as long again as it should.
    """
    of_context = row * growth / 2000
    cost = cost_of(row, rule=rule, of_context=of_context)
    budget = RowBudget(100_000, most, cost, part)
    machine = Machine(budget, cost, row * share, of_context * share)
    answers = [1] * num_answers
    alone = cost.together(answers, 100)
    limit = max(SMOOTH_ROUND_SECONDS * part, SLOWDOWN_FACTOR * alone) if isinstance(most, str) else most * part
    for context in (0, 20_000):
        left, read = [5000], [context]
        while left[0]:
            before = left[0]
            seconds = machine.round(answers, left, read)
            is_least = before - left[0] <= LEAST_PROMPT_ROWS
            is_first = read[0] - context == before - left[0]
            # What a row takes is known from the calls before, and grows with the context.
            assert seconds <= (1.6 if is_first else 1.35) * limit or is_least


def test_what_prompts_take_is_learned_from_the_calls() -> None:
    """A row was measured to take four times as long as it does: soon, rounds are as long as they may be."""
    cost = cost_of(0.001)
    machine = Machine(RowBudget(10_000, 0.1, cost), cost, 0.00025)
    left, read = [10_000], [0]
    seconds = [machine.round([1] * 8, left, read) for _ in range(8)]
    assert seconds[0] < 0.06
    assert 0.09 < seconds[-1] <= 0.1


def test_one_slow_call_changes_little() -> None:
    cost = cost_of(0.001)
    machine = Machine(RowBudget(10_000, 0.1, cost), cost, 0.001)
    left, read = [10_000], [0]
    for _ in range(3):
        usual = machine.round([1] * 8, left, read)
    machine.prompt_row *= 100
    machine.round([1] * 8, left, read)
    machine.prompt_row /= 100
    seconds = [machine.round([1] * 8, left, read) for _ in range(6)]
    assert min(seconds) > usual / 2
    assert seconds[-1] == pytest.approx(usual, rel=0.2)


def test_answers_alone_teach_how_fast_the_machine_is() -> None:
    """On a machine that became half as fast: pieces of prompts have the time that is really left."""
    cost = cost_of(0.001)
    slow = cost_of(0.002, call=0.02)
    machine = Machine(RowBudget(10_000, 0.2, cost), slow, 0.002)
    for _ in range(40):
        machine.round([1] * 8, [], [])
    left, read = [10_000], [0]
    assert all(machine.round([1] * 8, left, read) < 0.21 for _ in range(5))


@pytest.mark.parametrize("scale", [0.97, 1.0])
def test_calls_that_take_no_longer_than_their_answers_should(scale: float) -> None:
    """Each reads a piece that costs nearly nothing. The estimates stay finite, and recover when rows cost more."""
    cost = cost_of(0.001, call=0.1)
    machine = Machine(RowBudget(512, 0.5, cost), replace(cost, scale=scale), 1e-7)
    for _ in range(4000):
        machine.round([1] * 8, [12], [0])
    assert cost.scale == pytest.approx(scale, rel=0.001)
    machine.prompt_row = 0.001
    left, read = [10_000], [0]
    seconds = [machine.round([1] * 8, left, read) for _ in range(8)]
    assert all(each < 0.52 for each in seconds[5:])
    assert seconds[-1] > 0.46


@pytest.mark.parametrize("num_decoding", [1, 7, 31])
def test_a_newcomers_prompt_is_not_shared_with_decoders(num_decoding: int) -> None:
    """3,000 tokens in calls of 512 rows. Shared evenly, they took 12, 48 and 189 rounds."""
    backend = FakeBackend(VOCAB_SIZE)
    decoding = [new_request([i % VOCAB_SIZE], max_new_tokens=500) for i in range(num_decoding)]
    budget = RowBudget(512)
    for request in decoding:
        assert admit(request, backend)
    step(backend, Scheduler(backend, budget, decoding))
    newcomer = new_request([1] * 3000, max_new_tokens=2)
    assert admit(newcomer, backend)
    rounds = 0
    while not newcomer.stats.num_generated_tokens:
        step(backend, Scheduler(backend, budget, [*decoding, newcomer]))
        rounds += 1
    assert rounds == 7
    assert all(request.stats.num_generated_tokens == 1 + rounds for request in decoding), "answers never wait"
    assert all(sum(call) <= 512 for call in backend.calls)


def test_a_piece_that_ends_at_an_answer_leaves_its_rows_to_others() -> None:
    """A chat of 40 turns that is no longer in the cache: answers are read alone, so a call reads one part of it."""
    backend, budget = FakeBackend(VOCAB_SIZE), RowBudget(512)
    chat, other = new_request([1] * 1600, max_new_tokens=1), new_request([2] * 4800, max_new_tokens=1)
    chat.sequence.answers = [(begin, begin + 20) for begin in range(20, 1600, 40)]
    for request in (chat, other):
        assert admit(request, backend)
    for _ in range(10):
        step(backend, Scheduler(backend, budget, [chat, other]))
    assert chat.slot.length == 10 * 20
    assert other.slot.length == 10 * (512 - 32)
    while not chat.ended:
        step(backend, Scheduler(backend, budget, [chat]))


@pytest.mark.parametrize("num_decoding", [1, 31])
def test_answers_that_are_scored_get_the_rows_that_others_leave(num_decoding: int) -> None:
    """They took 64 rows a round each, whatever a round may take."""
    backend = FakeBackend(VOCAB_SIZE)
    decoding = [new_request([i % VOCAB_SIZE], max_new_tokens=500) for i in range(num_decoding)]
    given = [[i % VOCAB_SIZE for i in range(k, k + 150)] for k in range(4)]
    scored = [new_request([1, 2], max_new_tokens=150) for _ in given]
    for request, token_ids in zip(scored, given, strict=True):
        give(request, token_ids)
    for request in (*decoding, *scored):
        assert admit(request, backend)
    budget, rounds = RowBudget(96), 0
    while running := [request for request in scored if not request.ended]:
        step(backend, Scheduler(backend, budget, [*decoding, *running]))
        rounds += 1
        assert sum(backend.calls[-1]) <= 96
        assert all(request.stats.num_generated_tokens == rounds for request in decoding), "answers never wait"
    assert [request.sequence.generated_token_ids for request in scored] == given


def test_prompts_that_wait_are_no_part_of_the_call() -> None:
    backend = FakeBackend(VOCAB_SIZE)
    requests = [new_request([1] * 300, max_new_tokens=1) for _ in range(4)]
    for request in requests:
        assert admit(request, backend)
    budget, rounds = RowBudget(64), list[list[int]]()
    while running := [request for request in requests if not request.ended]:
        step(backend, Scheduler(backend, budget, running))
        rounds.append([request.slot.length for request in requests])
    assert backend.calls[0] == [64]
    assert [sum(lengths) for lengths in rounds[:3]] == [64, 128, 192]
    assert all(request.stats.num_generated_tokens == 1 for request in requests)


# Policies and their drafters in the loop: shared calls, observations, and releases.


def make_request(policy: DraftPolicy | None, prompt: Sequence[int] = (1, 2)) -> Answer:
    return new_request(prompt, policy, max_new_tokens=12, num_assistant_tokens=3)


class Counting(Drafter):
    """Proposes one token. Records calls, reserved sequences and observations. It has no hash."""

    __hash__ = None  # type: ignore[assignment]
    num_assistant_tokens = 1

    def __init__(self, *, room: bool = True, error: Exception | None = None) -> None:
        self.room, self.error = room, error
        self.seconds = 0.0
        self.asked: list[int] = []
        self.held: list[TokenSequence] = []
        self.heard = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counting)

    def reserve(self, sequence: TokenSequence, max_tokens: int, num_cached: int) -> bool:
        if self.error and self.room:
            raise self.error
        if self.room:
            self.held.append(sequence)
        return self.room

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked.append(len(requests))
        self.seconds += 1.0
        return [Draft([0]) for _ in requests]

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        self.heard += 1

    def release(self, sequence: TokenSequence) -> None:
        self.held.remove(sequence)


def several(*drafters: Drafter) -> Fixed:
    """A policy with several drafters."""
    policy = Fixed(drafters[0])
    policy.drafters = drafters
    return policy


def test_requests_of_one_drafter_are_drafted_for_in_one_call() -> None:
    """Drafters are the same if they are one object. Equal objects are called separately."""
    main, drafter, other = FakeBackend(6), Counting(), Counting()
    assert Fixed(drafter) == Fixed(drafter) != Fixed(other)  # though their hashes may be equal
    requests = [make_request(Fixed(each)) for each in (drafter, other, drafter)]
    for request in requests:
        assert admit(request, main)
    for _ in range(3):
        step(main, Scheduler(main, RowBudget(64), requests))
    assert not any(request.error for request in requests)
    assert drafter.asked == [2, 2]  # the first round reads the prompts
    assert other.asked == [1, 1]
    assert (drafter.heard, other.heard) == (6, 3)


def test_places_are_taken_with_all_drafters_or_with_none() -> None:
    main, first, full = FakeBackend(6), Counting(), Counting(room=False)
    assert not admit(make_request(several(first, full)), main)
    assert first.held == []
    with pytest.raises(KeyError, match="odd"):
        admit(make_request(several(first, Counting(error=KeyError("odd")))), main)
    assert first.held == []
    request = make_request(several(first, Counting()))
    assert admit(request, main)
    assert first.held == [request.sequence]


def test_a_drafter_that_cannot_let_go_does_not_keep_the_others_from_it() -> None:
    main, first, stubborn, last = FakeBackend(6), Counting(), Counting(), Counting()
    request = make_request(several(first, stubborn, last))
    assert admit(request, main)
    stubborn.held.clear()
    with pytest.raises(ValueError, match="not in list"):
        release(request)
    assert first.held == last.held == []
    assert request.slot.closed  # type: ignore[attr-defined]
