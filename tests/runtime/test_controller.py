"""The cost of calls, the value of drafts, and the controller's limited losses, in virtual time."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.loop import step
from outrider.decoding.row_budget import RowBudget
from outrider.decoding.scheduler import Scheduler
from outrider.drafters import DraftModel, Suffix
from outrider.drafters.controller import Acceptance, ConfidenceThreshold, Controller, Record, Records, Share
from outrider.drafters.controller.batch import Batch
from outrider.drafters.controller.ledger import COPIES, Account, Ledger, LedgerEntry
from outrider.drafters.controller.pricing import affordable, best_length, should_read, should_try
from outrider.drafters.controller.rules import WorthIt
from outrider.system.saved import SavedValue
from outrider.tokens.verifiers import Coupled, Greedy
from outrider.types import Capabilities, Draft, DraftRequest, FixedShape
from virtual_time import DRAFT_MS, HEAD_MS, MAIN_MS, Liar, World, cost_of, speed_up


def asked_of(model: DraftModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The tokens of context and the limit of each draft that a model is asked for from now on."""
    asked: list[tuple[int, int]] = []

    def propose(requests: Sequence[DraftRequest]) -> list[Draft]:
        asked.extend((len(request.sequence), request.limit) for request in requests)
        return DraftModel.propose(model, requests)

    monkeypatch.setattr(model, "propose", propose)
    return asked


def test_a_model_that_always_agrees_is_used_to_the_full() -> None:
    """Drafts of 15 take 15 · 14.5 + 70.2 ms for 16 tokens, against 16 · 39.4 ms: 2.19 times as fast.

    The model's confidences are low, so the controller must first observe that all its tokens are accepted.
    """
    world = World(0.0)
    assert speed_up(world, num=200) > 1.6
    assert speed_up(world, num=400) > 1.9


@pytest.mark.parametrize("prompt", [(1, 2, 3), tuple(range(1, 62))], ids=["it has read", "too long for it"])
def test_a_model_is_only_asked_where_it_can_draft(prompt: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with a full context, or without a slot on its device. Then it costs nothing, and displaces no copy."""
    world = World(0.0)
    model = world.model
    model._context_length = 60
    if len(prompt) > 60:
        fixed = FixedShape(window=8, max_prompt_tokens=60, max_tokens=100)
        monkeypatch.setattr(world.draft, "capabilities", Capabilities(True, fixed=fixed))
    asked = asked_of(model, monkeypatch)
    drafted, _, request = world.decode(prompt, num=100)
    assert drafted == world.decode(prompt, drafted=False, num=100)[0]
    assert max((length + limit - 1 for length, limit in asked), default=0) <= 60
    assert bool(asked) == bool(request.stats.num_draft_tokens) == (len(prompt) < 60)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("noise", "noise_of_head"), [(0.1, 0.8), (0.2, 0.8), (0.2, 1.1), (0.3, 0.8), (0.3, 0.5)])
def test_two_models_are_as_good_as_the_better_one(noise: float, noise_of_head: float) -> None:
    """A draft model whose tokens cost a third of a pass, and a head whose tokens cost a twentieth, and are worse.

    A model that is no better than the other one does not read prompts.
    """
    prompts = [[(7 * i * i + 3 * n) % 50 for i in range(120)] for n in range(12)]
    seconds = {}
    for names in (("draft",), ("head",), ("draft", "head")):
        world = World(noise)
        world.add_model("head", noise_of_head, HEAD_MS)
        world.controller = world.controller_of(names)
        seconds[names] = sum(world.decode(prompt, num=64)[1] for prompt in prompts)
    assert seconds["draft", "head"] < 1.08 * min(seconds["draft",], seconds["head",])


def test_answers_pay_for_a_first_call_only_where_it_is_known_to_pay() -> None:
    """It packs the weights: 25 plain rounds. An unknown model waits for an answer of which that is a small part."""
    counts = {}
    for known in (False, True):
        world = World(0.0)
        world.model.cost = dataclasses.replace(cost_of(DRAFT_MS), first=1.0)
        if known:
            world.controller.records.of_model(Greedy(), "draft").share = Share(0.9, weight=300.0, memory=0.999)
        counts[known] = [world.decode((1, 2, 3), num=24)[2].stats.num_drafts for _ in range(12)]
    assert not any(counts[False])
    at = next(i for i, count in enumerate(counts[True]) if count)
    assert 1 <= at < 12  # as many tokens were answered without it as would have paid for it
    assert all(counts[True][at:])


@pytest.mark.parametrize("num", [6, 16, 40, 200])
def test_copies_that_are_always_wrong_have_a_budget(num: int) -> None:
    """For answers of any length: the first one of an unknown drafter, and later ones."""
    world = World(copies=Liar(), model=False)
    assert [speed_up(world, num=num) > 0.96 for _ in range(3)] == [True] * 3


def test_a_first_copy_is_no_longer_than_the_answer_may_lose() -> None:
    """Nine more rows take 15.7 ms, and 16 tokens' share of 39.4 ms each is 15.8."""
    copies = Liar(15)
    world = World(copies=copies, model=False)
    *_, request = world.decode(num=20)
    assert max(request.stats.num_draft_tokens_per_round) == 9


def test_a_model_that_lost_elsewhere_goes_on_where_it_saves_time() -> None:
    world = World()
    request = world.request((1, 2, 3), True, 200)
    scheduler = Scheduler(world.main, RowBudget(2048), [request])
    while request.stats.num_drafts < 4:
        step(world.main, scheduler)
    world.controller._ledger._saved["draft"] = -8 * 0.04  # by other answers
    for _ in range(4):
        step(world.main, scheduler)
    assert request.stats.num_drafts == 8


class Asked(Suffix):
    """Notes the requests, and the confidences of what it proposed."""

    def __init__(self) -> None:
        super().__init__()
        self.proposed: list[list[float]] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = super().propose(requests)
        self.proposed.append([each for draft in drafts for each in draft.confidences or []])
        return drafts


@pytest.mark.parametrize(("together", "fewest", "most"), [(4, 4, 12), (1, 32, 40)])
def test_considering_copies_takes_a_hundredth_of_the_time_unless_they_gain_it_back(
    together: int, fewest: int, most: int
) -> None:
    texts = [[(7 * i * i + 3 * n) % 50 for i in range(20)] for n in range(together)]
    looks = list[int]()
    for periods in ((), ((60, 20),)):
        world, copier = World(model=False, periods=periods), Asked()

        def clock(world: World = world, copier: Asked = copier) -> float:
            return world.seconds + 0.01 * len(copier.proposed)  # a look takes a quarter of a plain round

        world.controller = Controller(world.main, cost_of(MAIN_MS), copier=copier, clock=clock)
        _, plain = world.decode_together(texts, False, 160)
        _, drafted = world.decode_together(texts, True, 160)
        looks.append(len(copier.proposed))
    assert fewest <= looks[0] <= most
    assert sum(plain) > 1.4 * sum(drafted)  # of the text that repeats itself


def calls() -> Callable[[], float]:
    """The seconds of calls so far, in rounds whose calls take 10 ms: asked at their begins and ends."""
    return functools.partial(next, itertools.count(0.0, 0.01))


def rounds_of(seconds: Sequence[float], num_tokens: int = 1, drafter: str | None = COPIES) -> tuple[Ledger, Account]:
    """A ledger after rounds that take this long by the clock, of which 10 ms were expected, and an answer's account."""
    times = [0.0, *(at for at in itertools.accumulate(seconds) for _ in range(2))]  # of an end, and of a begin
    ledger, account = Ledger(iter(times).__next__, calls()), Account(1.0, 0.01)
    ledger.open(COPIES, 0.0)
    for _ in seconds:
        ledger.begin(0.01, 1)
        is_plain = drafter is None
        ledger.chose([LedgerEntry(account, drafter, 0.01, num_drafted=not is_plain)], is_plain=is_plain)
        ledger.committed(account, num_tokens, counts=True)
    ledger.end(counts=True)
    return ledger, account


def test_a_ledger_counts_by_the_clock() -> None:
    """Plain rounds show what the host adds to their calls; then a round of 3 tokens saves twice as much."""
    ledger, account = rounds_of([0.012] * 8, drafter=None)
    assert account.balance == 0.0
    assert account.spent == pytest.approx(0.096)
    ledger, account = rounds_of([0.012, 0.012, 0.9])  # before a plain round, every round shows it; the last has waited
    assert account.balance == pytest.approx(0.0, abs=1e-9)
    assert ledger.is_open(COPIES)
    ledger, account = rounds_of([0.010] * 4 + [0.015] * 4, num_tokens=1)
    assert account.balance < 0
    assert not ledger.is_open(COPIES)
    ledger, account = rounds_of([0.010] * 9, num_tokens=3)
    assert account.balance == pytest.approx(0.08)  # bounded: a lead is not lost for ever
    assert ledger.credit(COPIES) == account.balance


def test_what_choosing_takes_is_a_cost_of_drafting() -> None:
    """The drafters that were considered share it, and the answer waits for it."""
    times = iter([0.0, 0.002, 0.012, 0.012, 0.014, 0.024])
    ledger, account = Ledger(times.__next__, calls()), Account(1.0, 0.01)
    ledger.open(COPIES, 0.0)
    for _ in range(2):
        ledger.begin(0.01, 1)
        ledger.decided([COPIES])
        ledger.chose([LedgerEntry(account, None, 0.01)], is_plain=True)
        ledger.committed(account, 1, counts=True)
    ledger.end(counts=True)
    assert account.balance == pytest.approx(-0.004)
    assert not ledger.is_open(COPIES)


def test_what_a_round_takes_longer_is_lost_by_those_that_draft() -> None:
    """In a batch of two, a draft that fails costs half a round. What both may lose together is there for the next."""
    times = iter([0.0, 0.03, 0.03])
    ledger, drafts, waits = Ledger(times.__next__, calls()), Account(1.0, 0.01), Account(1.0, 0.01)
    ledger.open(COPIES, 0.0)
    ledger.begin(0.02, 2)
    ledger._num_plain = 1  # the host's part is known
    ledger.chose([LedgerEntry(drafts, COPIES, 0.02, num_drafted=1), LedgerEntry(waits, None, 0.01)], is_plain=False)
    for account in (drafts, waits):
        ledger.committed(account, 1, counts=True)
    ledger.end(counts=True)
    assert drafts.balance == pytest.approx(-0.01)
    assert waits.balance == 0.0
    waits.spent = 1.0
    assert drafts.limit(0.0, 0.01, [drafts, waits]) == pytest.approx(drafts.limit(0.0, 0.01) + 0.025)
    drafts.balance = -1.0
    assert waits.limit(0.0, 0.01, [drafts, waits]) == pytest.approx(0.025)  # the debt of another is not its own


def test_the_rules_are_pure() -> None:
    assert should_read(0.01, price=0.6, left=[100, 40])  # 1.4 seconds are saved for 1.2
    assert not should_read(0.01, price=0.8, left=[100, 40])
    assert not should_read(-0.01, price=0.0, left=[100])
    assert should_read(0.01, price=0.04, left=[3, 100, 100])  # to wait loses 0.06 seconds, to read in vain 0.01
    assert not should_read(0.01, price=0.6, left=[3, 100, 100])  # 0.57
    assert should_try(0.01, idle=1.0, plain=0.04, leads=False)
    assert not should_try(0.02, idle=1.0, plain=0.04, leads=False)
    assert should_try(0.02, idle=1.0, plain=0.04, leads=True)
    assert should_try(0.2, idle=4.0, plain=0.04, leads=False)  # once in a hundred tokens
    assert affordable([0.01, 0.02, 0.03], 0.025) == 2
    assert affordable([0.01, 0.02], 0.005) == affordable([], 1.0) == 0


@pytest.mark.parametrize("together", [1, 4])
def test_a_text_that_begins_to_repeat_itself_is_copied_soon(together: int) -> None:
    world = World(copies=Suffix(), model=False, periods=((60, 20),))
    prompts = [[(7 * i * i + 3 * n) % 50 for i in range(20)] for n in range(together)]
    _, plain = world.decode_together(prompts, False, 160)
    _, drafted = world.decode_together(prompts, True, 160)
    assert sum(plain) > 1.6 * sum(drafted)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 1.0, 3.0])
def test_a_model_that_drafts_for_few_of_a_batch_is_priced_so(noise: float, count: int) -> None:
    """Those that it drafts for pay for its calls, however many are in the batch."""
    plain, drafted = World(noise), World(noise)
    prompts = [[7 * i + 1, *range(1, 60)] for i in range(count)]
    for num in (48, 48):  # the second time with records
        expected, seconds = plain.decode_together(prompts, False, num)
        found, with_drafts = drafted.decode_together(prompts, True, num)
        assert found == expected
        assert max(with_drafts) < 1.04 * max(seconds)


def test_a_copy_begins_with_a_part_where_that_takes_less_time() -> None:
    """Up to two tokens cost nothing, more cost 40 ms. A round costs 20 ms."""
    cost = cost_of({3: 20.0, 4: 60.0, 32: 60.0})
    batch = Batch(cost, 1, 100.0, cost.together([1]), rate=50.0, least=1, before=1, change=0.0)
    assert batch.first_part([0.8, 0.9, 0.9] + [0.95] * 8, 11) == 2  # 0.648 times 60 ms, or 40 ms
    assert batch.first_part([0.8, 0.9, 0.95] + [0.95] * 8, 11) == 11  # 0.684
    assert batch.first_part([0.1, 0.9], 2) == 2  # for nothing
    dear = cost_of({1: 20.0, 2: 30.0, 12: 60.0})
    batch = Batch(dear, 1, 100.0, dear.together([1]), rate=50.0, least=1, before=1, change=0.0)
    assert batch.first_part([0.3] + [0.99] * 10, 11) == 0  # the main model shows first whether it is right


def test_a_model_that_does_not_pay_is_not_tried_while_copies_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A try of two tokens would replace a copy of 15. Once a copy was wrong, the model is tried again."""
    world = World([(0, 0.2), (60, 50.0), (500, 0.2)], copies=Suffix(), periods=[(100, 40), (500, 0)])
    asked = asked_of(world.model, monkeypatch)
    drafted, _, _ = world.decode(num=700)
    assert drafted == world.decode(drafted=False, num=700)[0]
    assert len([at for at, _ in asked if 200 <= at < 500]) <= 1
    assert [at for at, _ in asked if at >= 500]


def test_a_number_of_rows_that_changes_has_its_price() -> None:
    """As in dynamic shapes: one draft changes the number of rows twice; the same number as before costs nothing."""
    cost = cost_of({1: 12.0, 16: 13.5})
    cost.change = 0.005
    plain = cost.together([1])
    steady, drafting = (Batch(cost, 1, 100.0, plain, 80.0, 1, before, 0.005) for before in (1, 4))
    assert steady.added([0]) == drafting.added([0]) == 0
    assert steady.added([3]) == pytest.approx(0.0003 + 2 * 0.005)
    assert drafting.added([3]) == pytest.approx(0.0003)
    # A model that goes on to draft as many tokens pays for one change, in a few rounds.
    assert steady.added_to_each(1)[3] == pytest.approx(0.0003 + 0.005 / 4)
    assert drafting.added_to_each(1)[3] == 0
    assert drafting.added([4]) == pytest.approx(0.0004 + 0.005)
    assert steady.allot([[0.5, 0.5]]) == [0]  # 0.75 tokens for 10 ms, where 0.8 are to be had without
    assert drafting.allot([[0.5, 0.5, 0.5]]) == [3]


def test_what_drafters_have_earned_is_kept(tmp_path: Path) -> None:
    file = SavedValue(tmp_path, {"bundle": "a"}, dict[str, Record])
    records = Records(file)
    for _ in range(50):
        records.of_model(Greedy(), "draft").observe(Draft([1, 2, 3], confidences=[0.8] * 3), [])
    records.save()  # not a moment after the last time
    assert file.read() is None
    records.save(at_once=True)
    known = Records(file)
    greedy = known.of_model(Greedy(), "draft")
    assert greedy.by_confidence.chance(0.8) < 0.2
    assert greedy == records.of_model(Greedy(), "draft")
    assert greedy.share.mean < 0.3
    sampled = known.of_model(Coupled(), "draft").share  # as greedy decoding's, but less sure
    assert sampled.mean == greedy.share.mean
    assert sampled.weight < greedy.share.weight


def test_a_new_model_is_not_considered_once_the_answer_has_lost_what_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    world, price, considered = World(50.0), Controller._price, list[str]()

    def noted(controller: Controller, name: str, *given: Any) -> Any:
        considered.append(name)
        return price(controller, name, *given)

    monkeypatch.setattr(Controller, "_price", noted)
    world.decode(num=20)
    assert 1 <= len(considered) < 4  # of 19 rounds


def test_a_text_that_becomes_easy_is_noticed_and_one_that_becomes_hard() -> None:
    """With a small draft model. A large one would have to read the answer first, which costs too much."""
    known = World([(0, 50.0), (200, 0.0)], draft_cost=0.35)  # known to be good in other answers
    known.controller.records.of_model(Greedy(), "draft").share = Share(0.8, weight=300.0, memory=0.999)
    becomes_easy = speed_up(known, num=400)
    becomes_hard = speed_up(World([(0, 0.0), (200, 50.0)], draft_cost=0.35), num=400)
    always_easy = speed_up(World(0.0, draft_cost=0.35), num=200)
    halves = 2 / (1 + 1 / always_easy)  # half of the text at 1, half as fast as an easy one
    assert becomes_easy > 0.88 * halves
    assert becomes_hard > 0.93 * halves


def test_calls_that_also_read_prompts_do_not_make_the_machine_seem_slower() -> None:
    """A draft would cost more than it does, and so would the next piece of a prompt."""
    world = World(0.0, copies=True, model=False)
    answer = world.request([1, 2, 3], drafted=True, num=300)
    step(world.main, Scheduler(world.main, RowBudget(64), [answer]))
    newcomer = world.request([1] * 1300, drafted=True, num=1)
    while not newcomer.ended:
        step(world.main, Scheduler(world.main, RowBudget(16), [answer, newcomer]))
    assert answer.stats.num_rounds > 30
    assert world.controller._main_cost.scale == pytest.approx(1.0, abs=0.01)


def test_a_long_prompt_is_not_read_for_a_short_answer() -> None:
    long_prompt = [1, 2, 3, 4] * 200
    world = World(0.3, draft_cost=0.35)
    world.decode(long_prompt, num=8)
    assert world.draft.seconds == 0
    world.decode(long_prompt, num=400)
    assert world.draft.seconds > 0


def test_a_prompt_is_not_read_before_an_answer_is_longer_than_those_that_ended_soon() -> None:
    """A good model is known, but not how long an answer gets: most of the last ones had three tokens."""
    world, texts = World(0.1), [[(7 * i * i + 3 * n) % 50 for i in range(100)] for n in range(6)]
    world.controller.records.of_model(Greedy(), "draft").share = Share(0.9, weight=300.0, memory=0.999)
    taken = []
    for text, num in zip(texts, (100, 3, 3, 3, 3, 60), strict=True):
        before = world.draft.seconds
        drafted, _, _ = world.decode(text, num=num, ends=True)
        taken.append(world.draft.seconds - before)
        assert drafted == world.decode(text, False, num, ends=True)[0]
        assert len(drafted) == num
    assert taken[0] > 0
    assert taken[3:5] == [0, 0]
    assert taken[5] > 0


def test_coupled_text_does_not_depend_on_the_controller() -> None:
    for noise in (0.0, 0.5, 50.0):
        options: dict[str, Any] = {"verifier": Coupled(), "temperature": 1.0, "seed": 5}
        assert speed_up(World(noise, copies=True), num=120, **options) > 0.85


@given(
    chances=st.lists(st.floats(0, 1), max_size=8),
    extra=st.lists(st.floats(0, 1), min_size=9, max_size=9),
)
def test_best_length_is_the_best(chances: list[float], extra: list[float]) -> None:
    costs = [0.0, *itertools.accumulate(extra)]
    kept = list(itertools.accumulate(chances, lambda a, b: a * b))
    worth = [sum(kept[:k]) - costs[k] for k in range(len(chances) + 1)]
    value, length = best_length(chances, costs)
    assert value == pytest.approx(max(worth))
    assert worth[length] == pytest.approx(value)


def test_a_token_is_worth_its_chance_against_its_seconds() -> None:
    rule = WorthIt(lambda confidence: confidence, 0.8, rate=25.0, step=0.015, check=[0, 0, 0.001, 0.002], longest=3)
    assert rule.wants_more([0.9])  # 0.72 tokens for 25 · 0.016 = 0.4
    assert not rule.wants_more([0.4])  # 0.32
    assert not rule.wants_more([0.9, 0.5])  # 0.36
    assert not rule.wants_more([1.0, 1.0, 1.0])  # there is no room for a fourth
    # A second token costs 25 · 0.045, more than it is worth. Two more cost 25 · 0.06, for 0.81 and 0.73 tokens.
    rule = dataclasses.replace(rule, next_chance=0.9, check=[0, 0, 0.03, 0.03])
    assert rule.wants_more([0.9])
    assert not dataclasses.replace(rule, longest=2).wants_more([0.9])


def test_a_second_candidate_is_worth_its_chance_against_its_branch() -> None:
    """A branch repeats the newest token and what is before its own, so that later ones cost more."""
    steps = [0.0, *itertools.accumulate([0.001] * 15)]
    rule = WorthIt(lambda confidence: confidence, 0.8, rate=25.0, step=0.0, check=steps, longest=15, second=0.4)
    assert rule.wants_branches
    assert rule.branch_places([0.5, 0.5]) == [0, 1]  # 0.2 and 0.1 tokens, for 25 · 0.002 and 25 · 0.003
    assert rule.branch_places([0.9, 0.5]) == [1]  # 0.04 and 0.18
    assert rule.branch_places([0.5] * 13) == [0]  # there is room for one branch, of two rows
    assert dataclasses.replace(rule, fork=0.004).branch_places([0.5, 0.5]) == [0]
    assert not dataclasses.replace(rule, fork=0.015).wants_branches
    assert not dataclasses.replace(rule, second=0.0).wants_branches


def test_second_candidates_are_drafted_where_rows_are_free() -> None:
    """The text is that of plain decoding, and rounds yield more than with chains."""
    rounds, seconds = {}, {}
    for trees in (True, False):
        world = World(0.3, copies=False)
        world.main.capabilities = dataclasses.replace(world.main.capabilities, trees=trees)
        expected, _, _ = world.decode(drafted=False, num=400)
        for _ in range(2):  # the second time with records
            found, seconds[trees], request = world.decode(num=400)
            assert found == expected
        rounds[trees] = request.stats.num_rounds
    assert rounds[True] < 0.96 * rounds[False]
    assert seconds[True] < 0.97 * seconds[False]


def test_confidence_threshold_is_openvino_genais() -> None:
    rule = ConfidenceThreshold(0.4)
    assert rule.wants_more([])
    assert rule.wants_more([0.2, 0.4])
    assert not rule.wants_more([0.9, 0.39])


def test_confidences_are_calibrated() -> None:
    acceptance = Acceptance()
    assert acceptance.chance(0.85) == pytest.approx(0.85)
    for i in range(400):
        acceptance.observe(0.85, accepted=i % 4 == 0)
    assert acceptance.chance(0.85) == pytest.approx(0.25, abs=0.03)
    assert acceptance.chance(0.15) == pytest.approx(0.15)
