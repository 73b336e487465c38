"""Mask tokens: what is proposed, what it costs, and that nothing else changes.

The main model is a fake whose rows change with every token that they follow, masks among them. So each draft is
compared with one made from scratch, from the committed tokens and the masks behind them.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enumeration import largest_difference, ways
from in_the_loop import InTurns, new_request, run
from outrider.decoding.loop import step
from outrider.decoding.request import Request
from outrider.decoding.scheduler import Scheduler
from outrider.decoding.slots import admit
from outrider.drafters import MaskTokens, Suffix
from outrider.drafters.controller import ConfidenceThreshold, Controller, Fixed
from outrider.drafters.controller.lookahead import Lookahead
from outrider.errors import NoTokenLeft, RequestError
from outrider.testing import FakeBackend
from outrider.testing.fake import FakeSlot
from outrider.tokens.sampling import DraftRows
from outrider.tokens.verifiers import BlockRejection, Coupled, Greedy, TokenRejection
from outrider.types import Chunk, Draft, DraftRequest, Logits, LogitsRow, Noise, Sequence
from outrider.types.backend import path_to
from virtual_time import ClockedBackend, World, cost_of, speed_up

VOCAB_SIZE, NUM_MASKS = 3, 3  # a third of all draft tokens are right


class Checked(MaskTokens):
    """Compares each draft with one that is made from scratch."""

    def __init__(self, main: FakeBackend, num_masks: int = NUM_MASKS, has_all: bool = True) -> None:
        super().__init__(num_masks)
        self.main, self.has_all, self.lengths = main, has_all, defaultdict[Sequence, list[int]](list)

    def propose(self, requests: Seq[DraftRequest]) -> list[Draft]:
        drafts = super().propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            expected = self.expected(request)
            lengths = self.lengths[request.sequence]
            lengths.append(len(draft))
            assert draft.token_ids == expected[: len(draft)]
            if self.has_all and len(lengths) > 1:
                assert len(draft) == len(expected)
        return drafts

    def expected(self, request: DraftRequest) -> list[int]:
        """A draft, from the rows behind the newest token but one."""
        *text, _ = request.sequence.token_ids
        drafted, made = list[int](), list[LogitsRow]()
        for i in range(min(self.requirements.num_masks, request.limit)):
            masks = range(self.main.vocab_size, self.main.vocab_size + i + 1)
            made.append(LogitsRow.of(self.main.logits_after([*text, *masks])))
            rows = DraftRows(made.__getitem__, request.sampler, Draft(drafted))
            try:
                token_id, _ = request.verifier.draw(rows, i, request.noise, len(request.sequence))
            except NoTokenLeft:
                break
            drafted.append(token_id)
            if token_id in request.eos_token_ids:
                break
        return drafted


def make_request(policy: Any, prompt: Seq[int] = (0, 1, 2), verifier: Any = None, **options: Any) -> Request:
    verifier = verifier or Greedy()
    sampling: dict[str, Any] = {} if type(verifier) is Greedy else {"temperature": 1.0}
    names = ("repetition_penalty", "no_repeat_ngram_size")
    sampling |= {name: options.pop(name) for name in names if name in options}
    return new_request(prompt, policy, sampling, **{"verifier": verifier, "noise": Noise(5)} | options)


verifiers = st.sampled_from([Greedy(), Coupled()])
prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9)


@settings(max_examples=60)
@given(
    verifiers,
    st.lists(prompts, min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([{}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 3}]),
    st.booleans(),
    st.integers(2, 9),
)
def test_drafts_are_those_of_the_masks_and_do_not_show(
    verifier: Any,
    texts: list[list[int]],
    most: int,
    num_masks: int,
    options: dict[str, Any],
    ends: bool,
    piece: int,
) -> None:
    """With several answers at once, with and without masks, and prompts that are read in pieces."""
    main = FakeBackend(VOCAB_SIZE, num_masks=num_masks, seed=len(texts))
    eos = frozenset({0} if ends else ())
    drafter = Checked(main, num_masks)
    made = []
    for policy in (None, Fixed(drafter)):
        mixed = [policy if i != 1 else None for i in range(len(texts))]
        asked: Any = {"num_assistant_tokens": most, "eos_token_ids": eos, **options}
        requests = [make_request(p, text, verifier, **asked) for p, text in zip(mixed, texts, strict=True)]
        made.append(
            (run(main, *requests, rows=piece, spared=(NoTokenLeft,)), [request.finish_reason for request in requests])
        )
    assert made[0] == made[1]


def test_a_third_is_accepted() -> None:
    main = FakeBackend(VOCAB_SIZE, num_masks=NUM_MASKS)
    drafter = Checked(main)
    request = make_request(Fixed(drafter), max_new_tokens=300)
    run(main, request)
    stats = request.stats
    assert 0.2 < stats.num_accepted_tokens_per_position[0] / stats.num_drafts < 0.5
    assert len(stats.num_accepted_tokens_per_position) == NUM_MASKS
    assert stats.tokens_per_round > 1.3
    # Behind the newest token and three draft tokens, three masks each; branches repeat what is before them.
    assert main.calls[10:11] == [[1 + 3 + 4 * NUM_MASKS]]


def test_masks_are_never_in_the_prefix_cache() -> None:
    """Nor is anything that was read behind one: texts that begin with an answer go on as without masks."""
    texts = []
    for num_masks in (0, NUM_MASKS):
        main = FakeBackend(VOCAB_SIZE, num_masks=NUM_MASKS)
        policy = Fixed(Checked(main)) if num_masks else None
        (first,) = run(main, make_request(policy))
        again = make_request(None, [*first, 1])
        texts.append(run(main, again))
        assert again.stats.num_cached_tokens == len(first) - 1
        for token_ids, _ in main.published[b""]:
            assert max(token_ids) < VOCAB_SIZE
    assert texts[0] == texts[1]


@pytest.mark.parametrize("room", [0, 1, 2, 9])
def test_masks_take_the_room_that_there_is(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for all branches, those behind the draft's last token are left: they go on with the chain."""
    monkeypatch.setattr(FakeSlot, "fork", lambda self, count, length: min(count, room))
    main = FakeBackend(VOCAB_SIZE, num_masks=NUM_MASKS)
    drafter = Checked(main, has_all=False)
    plain, request = make_request(None, max_new_tokens=60), make_request(Fixed(drafter), max_new_tokens=60)
    run(main, plain)
    main.calls.clear()
    run(main, request)
    assert request.sequence.token_ids == plain.sequence.token_ids
    calls = {count for (count,) in main.calls[2:-9]}
    assert calls == ({16} if room > 2 else {4, 7})
    assert request.stats.num_accepted_tokens > 5


class Fleeting(FakeBackend):
    """Its rows are valid until its next call, as a device's are."""

    rows: Seq[Logits] = ()

    def submit(self, chunks: Seq[Chunk]) -> FakeBackend.Step:
        for row in self.rows:
            row[:] = np.nan
        made = super().submit(chunks)
        self.rows = made.rows
        return made


def test_an_answer_that_pauses_goes_on() -> None:
    """Others' calls lie between the masks and the draft."""
    main = Fleeting(VOCAB_SIZE, num_masks=NUM_MASKS)
    (plain,) = run(main, make_request(None, max_new_tokens=40))
    drafter = Checked(main)
    request, other = make_request(Fixed(drafter), max_new_tokens=40), make_request(None, (2, 2), max_new_tokens=99)
    for each in (request, other):
        assert admit(each, main)
    while not request.ended:
        step(main, [request, other], Scheduler(32))
        step(main, [other], Scheduler(32))
        assert request.error is None
    assert request.sequence.token_ids == plain
    assert request.stats.num_accepted_tokens > 5


def test_copies_and_masks_take_turns() -> None:
    """A round with another drafter's draft has no masks, and the next one nothing to propose."""

    main = FakeBackend(VOCAB_SIZE, num_masks=NUM_MASKS)
    drafter = Checked(main, has_all=False)
    request = make_request(InTurns((drafter, Suffix()), [2, 1, 1, 1, 1]), max_new_tokens=80)
    plain, drafted = run(main, make_request(None, max_new_tokens=80)), run(main, request)
    assert drafted == plain
    lengths = drafter.lengths[request.sequence]
    assert [i for i, length in enumerate(lengths[:-1]) if not length] == [*range(0, len(lengths) - 1, 4)]


def test_a_rule_ends_drafts() -> None:
    main = FakeBackend(VOCAB_SIZE, num_masks=NUM_MASKS)
    drafter = Checked(main, has_all=False)
    request = make_request(Fixed(drafter), rule=ConfidenceThreshold(0.7), max_new_tokens=80)
    plain, drafted = run(main, make_request(None, max_new_tokens=80)), run(main, request)
    assert drafted == plain
    assert {1, 2, 3} == {*drafter.lengths[request.sequence][1:-3]}


def test_a_main_model_without_masks_is_refused() -> None:
    with pytest.raises(RequestError, match="needs 3 mask tokens, and the main model reads 2 here"):
        admit(make_request(Fixed(MaskTokens(3))), FakeBackend(VOCAB_SIZE, num_masks=2))


# The shape of a draft with masks


@given(
    st.integers(0, 6).flatmap(lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n)))),
    st.lists(st.integers(0, 3), min_size=7, max_size=7),
    st.booleans(),
)
def test_what_is_read_for_a_draft(parents: tuple[int, ...], counts: list[int], is_chain: bool) -> None:
    """Behind each row its own masks, in their order, as a chain; the draft's tokens keep their places."""
    size = len(parents)
    shape = None if is_chain else [*parents]
    draft = Draft([*range(10, 10 + size)], parents=shape, num_masks=counts[: size + 1])
    reading = draft.with_masks([20, 21, 22])
    above = reading.parents if reading.parents is not None else [*range(-1, len(reading) - 1)]
    assert reading.token_ids[:size] == draft.token_ids
    assert above[:size] == ([*range(-1, size - 1)] if is_chain else [*parents])
    for node in range(-1, size):
        path = draft.path_to(node)
        masks = draft.masks_behind(path)
        assert [reading.token_ids[i] for i in masks] == [20, 21, 22][: counts[node + 1]]
        for place, i in enumerate(masks):
            assert path_to(i, above) == [*path, *masks[: place + 1]]
    assert len(reading) == size + sum(counts[: size + 1])
    assert reading.num_masks is None
    assert draft.num_rows == reading.num_rows
    assert (reading.parents is None) == (len(reading.branches) <= 1)
    assert draft.cut(2).num_masks == counts[: min(size, 2) + 1]


# Rejection sampling, by enumeration


@pytest.mark.parametrize("verifier", [TokenRejection(), BlockRejection()], ids=str)
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_rejection_gives_the_main_models_joint_distribution(verifier: Any, most: int, seed: int) -> None:
    """Of whole answers, over all rounds: drafts are drawn from what the round before has read."""
    laws: list[dict[tuple[int, ...], float]] = []
    num_accepted = 0
    for drafter in (None, MaskTokens(2)):
        law: dict[tuple[int, ...], float] = defaultdict(float)

        def answer(noise: Noise, drafter: Any = drafter) -> Request:
            policy = Fixed(drafter) if drafter else None
            options = {"max_new_tokens": 4, "num_assistant_tokens": most, "reuse": False}
            request = make_request(policy, (0, 1), verifier, **options)
            request.noise = noise
            run(FakeBackend(2, num_masks=2, seed=seed), request)
            return request

        for way, request in ways(answer):
            law[tuple(request.sequence.generated_token_ids)] += way.probability
            num_accepted += request.stats.num_accepted_tokens
        laws.append(law)
    plain, drafted = laws
    assert abs(sum(plain.values()) - 1) < 1e-12
    assert largest_difference(plain, drafted) < 1e-12
    assert num_accepted > 10


# The price


class Seer(ClockedBackend):
    """A main model whose masks are right: its row behind them is for the token that it will say there, or noise.

    blind: the share of positions at which they are wrong.
    """

    blind = 0.0

    def logits_after(self, token_ids: Seq[int]) -> Logits:
        text = [token_id for token_id in token_ids if token_id < self.vocab_size]
        num_masks = len(token_ids) - len(text)
        for _ in range(num_masks):
            text.append(int(super().logits_after(text).argmax()))
        is_wrong = num_masks > 0 and len(text) * 0.618 % 1 < self.blind
        return -super().logits_after(text) if is_wrong else super().logits_after(text)


class MaskWorld(World):
    """A main model with mask tokens, in virtual time. blind: see `Seer`. milliseconds: of its calls, by rows."""

    def __init__(self, blind: float, milliseconds: dict[int, float]) -> None:
        super().__init__(model=False)
        cost = cost_of(milliseconds)
        self.seer = self.main = Seer(cost, num_masks=4)
        self.seer.blind = blind
        self.controller = Controller(self.main, cost_of(milliseconds), models={"masks": MaskTokens(4)})


FREE = {1: 40.0, 8: 40.2, 16: 40.4, 32: 60.0}
DEAR = {1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0, 16: 160.0, 32: 320.0}
STEEP = {1: 40.0, 2: 44.0, 4: 52.0, 8: 68.0, 16: 100.0, 32: 164.0}
STEEPER = {1: 40.0, 2: 52.0, 4: 76.0, 8: 124.0, 16: 220.0, 32: 412.0}  # a draft of chance 0.3 is worth its row


def test_masks_are_read_where_rows_are_free() -> None:
    world = MaskWorld(0.0, FREE)
    assert speed_up(world) > 2.5


def test_masks_are_not_read_where_rows_cost_what_they_gain() -> None:
    """Not even good ones, but for a try now and then."""
    world = MaskWorld(0.0, DEAR)
    world.main.calls.clear()
    assert speed_up(world) > 0.95
    assert sum(count == 1 for (count,) in world.main.calls) > 0.9 * len(world.main.calls)


def test_masks_that_are_always_wrong_cost_next_to_nothing() -> None:
    assert speed_up(MaskWorld(1.0, STEEP)) > 0.97


def test_masks_that_are_sometimes_right_are_tried_again() -> None:
    """A try takes two rounds: one reads masks, the next one shows what they are good for."""
    world = MaskWorld(1.0, STEEPER)
    stats = world.decode(num=600)[2].stats
    num_tries = sum(count == 2 for (count,) in world.main.calls) / 2
    assert stats.num_drafts > 5
    assert num_tries - stats.num_drafts < 1
    world.seer.blind = 0.0
    assert speed_up(world, num=600) > 1.1


@settings(max_examples=200)
@given(
    st.lists(st.floats(0, 1), max_size=4),
    st.floats(0.01, 1),
    st.integers(1, 4),
    st.lists(st.floats(0, 0.1), min_size=16, max_size=16),
    st.floats(0, 0.02),
)
def test_masks_are_worth_their_chance_against_their_rows(
    chances: list[float], chance: float, most: int, steps: list[float], fork: float
) -> None:
    """By definition: a row's masks gain the next draft's value if the draft ends there."""
    check, rate = [0.0, *itertools.accumulate(steps)], 5.0
    ahead = Lookahead.of(chance, most, rate, check, fork)
    values = [sum(chance**i for i in range(1, n + 1)) - rate * check[n] for n in range(most + 1)]
    assert ahead.value == pytest.approx(max(values))
    assert values[ahead.count] == pytest.approx(ahead.value)
    wanted, gain = ahead.plan(chances)
    assert ahead.num_masks(chances) == wanted
    assert len(wanted) == len(chances) + 1
    draft = Draft([0] * len(chances), num_masks=wanted)
    assert draft.num_rows <= len(check)
    reached = [float(np.prod(chances[:i])) for i in range(len(chances) + 1)]
    ends = [reached[i] * (1 - chances[i]) if i < len(chances) else reached[i] for i in range(len(reached))]
    worth = sum(end for end, count in zip(ends, wanted, strict=True) if count) * ahead.value
    seconds = check[draft.num_rows - 1] - check[len(chances)] + fork * sum(map(bool, wanted[:-1]))
    assert gain == pytest.approx(worth - rate * seconds)
    assert gain >= 0
    best = ahead.best(chances)
    for n in range(len(chances) + 1):
        kept = sum(reached[1 : n + 1])
        assert best >= kept - rate * check[n] + ahead.plan(chances[:n])[1] - 1e-9
