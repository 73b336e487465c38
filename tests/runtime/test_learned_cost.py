"""Costs that calls correct: what is learned, what is not, and what later loads begin with. In virtual time."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.bundle import Bundle
from outrider.decoding import retiming
from outrider.decoding.answer import Answer
from outrider.decoding.loop import step
from outrider.decoding.retiming import Retiming
from outrider.decoding.row_budget import RowBudget
from outrider.decoding.scheduler import Scheduler
from outrider.decoding.slots import release
from outrider.drafters import DraftModel
from outrider.drafters.controller import Controller, Share
from outrider.models.tuning.learned_cost import LearnedCost
from outrider.models.tuning.measure import PassCost, measure_pass
from outrider.system.saved import SavedValue
from outrider.testing import FakeBackend
from outrider.tokens.verifiers import Greedy
from outrider.types import NO_PROMPT, Prompt, RowRule, SteadyRows
from toys import load_toy
from virtual_time import DRAFT_MS, MAIN_MS, ClockedBackend, World, cost_of

CHANGE = 0.005
SURE = 0.03


def times(cost: PassCost, factor: Callable[[int], float]) -> PassCost:
    """A cost with other seconds for each number of rows, which does not say how sure it is."""
    seconds = tuple(factor(rows) * each for rows, each in zip(cost.rows, cost.near, strict=True))
    return dataclasses.replace(cost, near=seconds, far=seconds)


def sure(cost: PassCost) -> PassCost:
    return dataclasses.replace(cost, doubt=(SURE,) * len(cost.rows))


def call(
    cost: LearnedCost, actual: PassCost, rows: int, count: int = 1, slower: float = 1.0, context: int = 256
) -> None:
    """Have a cost observe calls of so many rows. slower: how much the machine's load makes them."""
    for _ in range(count):
        before = cost._before
        cost.observe([rows], context, slower * actual.together([rows], context, before))


def ratios(cost: PassCost, actual: PassCost, rows: Sequence[int] = (2, 3, 4, 6, 8)) -> list[float]:
    return [cost(n) / actual(n) for n in rows]


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_a_level_that_is_wrong_is_found_by_the_first_calls(factor: float) -> None:
    actual = cost_of(DRAFT_MS)
    cost = LearnedCost.of(times(actual, lambda _: factor))
    call(cost, actual, 1, 6 if factor > 1 else 40)
    assert ratios(cost, actual, (1, 2, 4, 8)) == pytest.approx([1.0] * 4, rel=0.05)  # also of rows that were not seen


def test_a_sure_cost_that_is_too_high_is_followed_too() -> None:
    actual = cost_of(DRAFT_MS)
    for plain in (sure(times(actual, lambda _: 5.0)), times(actual, lambda _: 5.0)):
        followed, learned = PassCost(plain.rows, plain.near, plain.far), LearnedCost.of(plain)
        for _ in range(60):
            followed.follow(followed(1), actual(1))
        call(learned, actual, 1, 12)
        assert followed(1) == pytest.approx(actual(1), rel=0.05)
        assert learned(1) == pytest.approx(actual(1), rel=0.05)


def test_a_shape_that_is_wrong_is_corrected_by_number_of_rows() -> None:
    actual = cost_of(MAIN_MS, change=CHANGE)
    cost = LearnedCost.of(times(actual, lambda rows: 3.0 if rows > 2 else 1.0))
    version = cost.version
    for rows in (2, 4, 2, 8, 6, 3, 2, 4):
        call(cost, actual, rows, 6)
    assert ratios(cost, actual) == pytest.approx([1.0] * 5, rel=0.06)
    assert cost.version > version  # what is derived from its numbers is made again
    assert cost.change == pytest.approx(CHANGE, abs=0.002)
    assert list(cost.near) == sorted(cost.near)


def test_the_seconds_of_a_context_are_corrected() -> None:
    near = cost_of(MAIN_MS)
    actual = dataclasses.replace(near, far=tuple(each + 0.02 for each in near.near))
    cost = LearnedCost.of(sure(near))
    for context in (256, 1024, 256, 2048, 1536) * 12:
        call(cost, actual, 2, 2, context=context)
    assert cost(2, 2048) == pytest.approx(actual(2, 2048), rel=0.08)
    assert cost(2, 256) == pytest.approx(actual(2, 256), rel=0.05)


def test_a_call_that_waited_teaches_little() -> None:
    actual = cost_of(MAIN_MS)
    cost = LearnedCost.of(times(actual, lambda _: 1.0))
    for rows in (2, 4, 8, 2):
        call(cost, actual, rows, 4)
        call(cost, actual, rows, 1, slower=20.0)
        call(cost, actual, rows, 4)
    assert ratios(cost, actual) == pytest.approx([1.0] * 5, rel=0.06)


def test_the_load_of_another_process_is_followed_and_not_saved() -> None:
    """It makes calls of more rows slower than others, and its end is as if the calls had become faster."""
    actual = sure(cost_of(MAIN_MS))
    cost = LearnedCost.of(actual)

    def some(count: int, slower: float) -> None:
        for _ in range(count):
            for rows in (2, 4, 8):
                call(cost, actual, rows, 2, slower=slower * (1 + rows / 16 if slower > 1 else 1))

    some(20, 1.0)
    some(20, 2.0)
    assert cost.scale > 1.8
    assert cost(8) > 2.5 * actual(8)
    found = ratios(cost.learned(), actual)
    assert found == pytest.approx([found[0]] * 5, rel=0.05)
    assert found[0] == pytest.approx(1.0, rel=0.15)  # the level: a load finds it anew
    some(30, 1.0)
    assert ratios(cost, actual) == pytest.approx([1.0] * 5, rel=0.06)


def test_calls_that_say_nothing_are_not_learned_from() -> None:
    cost = LearnedCost.of(cost_of(MAIN_MS))
    known = cost.near, cost.scale
    cost.observe([2], 256, 1.0)  # nobody knows what the call before was
    cost.observe((), 256, 1.0)  # a piece of a prompt
    cost.observe([2], 256, 1.0)
    cost.observe([200], 256, 1.0)  # more rows than were measured
    cost.observe([3], 256, 0.0)
    assert (cost.near, cost.scale) == known
    alone = LearnedCost.of(dataclasses.replace(cost_of(MAIN_MS), one_call=False))
    for _ in range(3):
        alone.observe([2, 2], 256, 1.0)  # two calls, one after the other
    assert (alone.near, alone.scale) == known


class Healing(World):
    """A world whose costs are stored as `main` and `draft` say, and learn; the engine's thread times calls again."""

    def __init__(self, noise: float, main: PassCost, draft: PassCost) -> None:
        super().__init__(noise, change=CHANGE)
        self.costs = LearnedCost.of(main), LearnedCost.of(draft)
        model = DraftModel(self.draft, context_length=4000, cost=self.costs[1])
        self.controller = Controller(self.main, self.costs[0], models={"draft": model}, clock=lambda: self.seconds)
        known = Share(0.75, weight=100.0, memory=0.999)  # as after answers with clean costs
        self.controller.records.of_model(Greedy(), "draft").share = known
        self.budget = RowBudget(2048, cost=self.costs[0])
        self.retiming = retiming_of(self.main, self.costs[0], self.draft, self.costs[1])
        self.costs[0].told = self._price

    def _price(self, cost: PassCost) -> None:
        steady = self.main.capabilities.steady
        assert steady is not None
        assert cost.change is not None
        steady.price(cost, cost.scale * cost.change)

    def run(self, requests: Sequence[Answer]) -> list[float]:
        (request,), began = requests, 0.0
        while not request.ended:
            round_began = self.seconds
            step(self.main, Scheduler(self.main, self.budget, [*requests]))
            began = began or self.seconds
            self.retiming.spent(self.seconds - round_began)
        release(request)
        return [self.seconds - began]


def retiming_of(main: FakeBackend, cost: PassCost, draft: FakeBackend, draft_cost: PassCost) -> Retiming:
    models = {
        "main": SimpleNamespace(backend=main, cost=cost, spec=SimpleNamespace(role="main", is_main=True)),
        "draft": SimpleNamespace(backend=draft, cost=draft_cost, spec=SimpleNamespace(role="draft", is_main=False)),
    }
    return Retiming(cast("Any", models))


CLEAN = cost_of(MAIN_MS, change=CHANGE), cost_of(DRAFT_MS)
NOISE = 0.2  # a good draft model: drafts save a quarter of the time
LATER = 300  # tokens after the first 500


@functools.cache
def clean_seconds() -> float:
    world = Healing(NOISE, *map(sure, CLEAN))
    world.decode(num=500)
    return world.decode(num=LATER)[1]


@functools.cache
def plain_token_ids() -> list[int]:
    return World(NOISE).decode(drafted=False, num=LATER)[0]


@pytest.mark.parametrize(("main", "draft"), [
    (CLEAN[0], times(CLEAN[1], lambda _: 5.0)),
    (times(CLEAN[0], lambda rows: 3.0 if rows > 2 else 1.0), CLEAN[1]),
    (times(CLEAN[0], lambda rows: 0.5 if rows > 2 else 1.0), CLEAN[1]),
], ids=["draft model five times too high", "rows too high", "rows too low"])  # fmt: skip
def test_after_500_tokens_costs_are_as_good_as_clean_ones(main: PassCost, draft: PassCost) -> None:
    world = Healing(NOISE, main, draft)
    world.decode(num=500)
    healed, seconds, _ = world.decode(num=LATER)
    assert healed == plain_token_ids()
    assert seconds < 1.03 * clean_seconds()
    found = [each.learned() for each in world.costs]
    assert ratios(found[0], CLEAN[0], (2, 3, 4)) == pytest.approx([1.0] * 3, rel=0.1)
    assert found[1](1) / found[0](2) == pytest.approx(CLEAN[1](1) / CLEAN[0](2), rel=0.1)


class Clock(ClockedBackend):
    """Its calls take the seconds of `cost`, times those of `slower` in turn."""

    def __init__(self, cost: PassCost, slower: Sequence[float] = (1.0,)) -> None:
        super().__init__(cost)
        self.slower, self.num_calls = slower, 0
        self.opened: list[Any] = []

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> Any:
        self.opened.append(super().open(max_tokens, prompt))
        return self.opened[-1]

    def submit(self, chunks: Any) -> FakeBackend.Step:
        began, self.num_calls = self.seconds, self.num_calls + 1
        step = super().submit(chunks)
        self.seconds = began + (self.seconds - began) * self.slower[self.num_calls % len(self.slower)]
        return step


MAIN: Any = None  # that jobs do not need here


def idle(timed: Retiming, most: int = 400) -> None:
    for _ in range(most):
        if timed.rest is None:
            return
        timed.go_on(MAIN, lambda: False)
    pytest.fail("it goes on without end")


def test_what_is_doubtful_is_timed_again_while_nothing_else_runs(tmp_path: Path) -> None:
    actual = cost_of(MAIN_MS, change=CHANGE)
    wrong = dataclasses.replace(times(actual, lambda rows: 3.0 if rows > 3 else 1.0), doubt=(SURE,) * 2 + (0.7,) * 6)
    main, draft = Clock(actual), Clock(cost_of(DRAFT_MS))
    cost, sound = LearnedCost.of(wrong), LearnedCost.of(sure(cost_of(DRAFT_MS)))
    cost.file = SavedValue(tmp_path, {"of": "main"}, PassCost)
    cost.stored = wrong
    timed = retiming_of(main, cost, draft, sound)
    assert timed.rest is None  # before the first answer
    timed.answered()
    assert timed.rest == retiming._REST
    timed.pause()
    assert timed.rest is None
    timed.answered()
    timed.go_on(MAIN, lambda: False)
    assert main.num_calls == 1  # whoever comes waits for one call
    timed.pause()
    assert all(slot.closed for slot in main.opened)
    timed.answered()
    idle(timed)
    assert not draft.num_calls
    assert ratios(cost, actual) == pytest.approx([1.0] * 5, rel=0.01)
    found = cost.file.read()
    assert found is not None
    assert ratios(found, actual) == pytest.approx([1.0] * 5, rel=0.01)
    assert max(found.doubt) <= SURE
    timed.answered()
    assert timed.rest is None  # nothing is doubtful now


def test_a_busy_machine_stays_in_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = cost_of(DRAFT_MS)
    cost = LearnedCost.of(times(actual, lambda rows: 2.0 if rows > 1 else 1.0))
    cost.file = SavedValue(tmp_path, {}, PassCost)
    cost.stored = dataclasses.replace(actual, doubt=(0.7,) * 6)
    cost.file.write(cost.stored)
    backend = Clock(actual, slower=(1.0, 3.0, 1.4, 2.2, 5.0, 1.9, 2.7))
    timed = retiming_of(Clock(actual), LearnedCost.of(sure(actual)), backend, cost)
    timed.answered()
    idle(timed)
    assert cost.doubtful_rows
    timed.answered()
    assert timed.rest == 8 * retiming._REST  # it is tried again, but more rarely
    found = cost.file.read()
    assert found is not None
    assert max(found.doubt) > 0.15
    monkeypatch.setattr(SavedValue, "write", lambda *_: pytest.fail("what is there is not written again"))
    cost.save()


def test_rows_of_answers_calls_are_padded_to_learn_what_they_take() -> None:
    steady = SteadyRows([0.0, *(0.04 + 0.002 * rows for rows in range(1, 17))], CHANGE, RowRule())
    assert steady.next(2) == 2
    assert steady.pad(8)
    assert (steady.peek(2), steady.next(2), steady.next(2)) == (8, 8, 2)
    assert not steady.pad(2)
    assert not steady.pad(17)
    assert steady.pad(4)
    assert steady.next(6) == 6


class Compiled(FakeBackend):
    """A compiled model, as far as costs need one."""

    def __init__(self) -> None:
        super().__init__(4)
        self.fingerprint = {"fake": "yes", "INFERENCE_NUM_THREADS": "1000000"}

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> Any:
        return super().open(max_tokens, prompt)

    def keep_rows(self, cost: Callable[[int], float], change: float) -> None:
        """Keeps none."""


def test_a_measurement_says_how_sure_it_is() -> None:
    """Turns that disagree, and a process that did not get its processors."""
    calm, lent = Clock(cost_of(MAIN_MS)), Compiled()
    assert max(measure_pass(calm, (1, 2, 4)).doubt) >= 0.1  # one load is not enough to be sure
    assert min(measure_pass(lent, (1, 2, 4)).doubt) >= 0.7  # a millionth of its threads' time


def test_an_idle_engine_times_calls_again(openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own thread, after an answer."""
    monkeypatch.setattr(LearnedCost, "doubtful_rows", [2])
    monkeypatch.setattr(retiming, "_REST", 0.0)
    done, taken = threading.Event(), list[str]()
    monkeypatch.setattr(Retiming, "finish", lambda _: done.set())
    monkeypatch.setattr(LearnedCost, "measured_again", lambda *_: taken.append(threading.current_thread().name))
    with load_toy(openvino_bundle) as engine:
        assert not done.is_set()
        engine.generate("abc", max_new_tokens=2, drafter=None)
        assert done.wait(20)
    assert {*taken} == {"outrider"}
