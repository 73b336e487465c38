"""What calls teach the price list: what is learned, what is not, and what later loads begin with. In virtual time."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calls import rows_of_call
from outrider.bundle import Bundle
from outrider.decoding import measuring
from outrider.decoding.answer import Answer
from outrider.decoding.loop import step
from outrider.decoding.measuring import MeasureCosts
from outrider.decoding.row_budget import RowBudget
from outrider.decoding.scheduler import Scheduler
from outrider.decoding.slots import release
from outrider.drafters.controller import Share
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.cost import stored
from outrider.models.cost.measure import CallTimes, measure_change, timer
from outrider.models.cost.table import ENOUGH, ONE_LOAD, UNKNOWN, CallCost
from outrider.system.saved import SavedValue
from outrider.testing import FakeBackend
from outrider.tokens.verifiers import Greedy
from outrider.types import Chunk, Exactness, Rounding, RowRule, SteadyRows
from toys import load_toy
from virtual_time import DRAFT_MS, MAIN_MS, World, cost_of, speed_up

CHANGE = 0.005


def times(cost: CallCost, factor: Callable[[int], float], calls: int = UNKNOWN) -> CallCost:
    """A cost with other seconds for each number of rows, each known from so many calls."""
    seconds = tuple(factor(rows) * each for rows, each in zip(cost.rows, cost.near, strict=True))
    return dataclasses.replace(cost, near=seconds, far=seconds, calls=(calls,) * len(cost.rows))


def sure(cost: CallCost) -> CallCost:
    return times(cost, lambda _: 1.0, 2 * ENOUGH)


def call(cost: CallCost, actual: CallCost, rows: int, count: int = 1, slower: float = 1.0, context: int = 256) -> None:
    """Have a cost observe calls of so many rows. slower: how much the machine's load makes them."""
    for _ in range(count):
        cost.observe([rows], context, slower * actual.together([rows], context, cost._before))


def ratios(cost: CallCost, actual: CallCost, rows: Sequence[int] = (2, 3, 4, 6, 8)) -> list[float]:
    return [cost(n) / actual(n) for n in rows]


@pytest.mark.parametrize("calls", [0, UNKNOWN, 2 * ENOUGH])
@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_a_level_that_is_wrong_is_found_by_the_first_calls(factor: float, calls: int) -> None:
    actual = cost_of(DRAFT_MS)
    cost = times(actual, lambda _: factor, calls)
    call(cost, actual, 1, 4)
    assert ratios(cost, actual, (1, 2, 4, 8)) == pytest.approx([1.0] * 4, rel=0.05)  # also of rows that were not seen


def test_a_shape_that_is_wrong_is_corrected_by_number_of_rows() -> None:
    actual = cost_of(MAIN_MS, change=CHANGE)
    cost = times(actual, lambda rows: 3.0 if rows > 2 else 1.0)
    version = cost.version
    call(cost, actual, 2, 6)
    call(cost, actual, 4, 6)
    assert ratios(cost, actual) == pytest.approx([1.0] * 5, rel=0.25)  # also of rows that were not seen
    for rows in (2, 8, 6, 3, 2, 4):
        call(cost, actual, rows, 6)
    assert ratios(cost, actual) == pytest.approx([1.0] * 5, rel=0.06)
    assert cost.version > version  # what is derived from its numbers is made again
    assert list(cost.near) == sorted(cost.near)


def test_the_seconds_of_a_context_are_corrected() -> None:
    near = cost_of(MAIN_MS)
    actual = dataclasses.replace(near, far=tuple(each + 0.02 for each in near.near))
    cost = sure(near)
    for context in (256, 1024, 256, 2048, 1536) * 12:
        call(cost, actual, 2, 2, context=context)
    assert cost(2, 2048) == pytest.approx(actual(2, 2048), rel=0.08)
    assert cost(2, 256) == pytest.approx(actual(2, 256), rel=0.05)


def test_a_call_that_waited_teaches_nothing() -> None:
    actual = cost_of(MAIN_MS)
    cost = times(actual, lambda _: 1.0)
    for rows in (2, 4, 8, 2):
        call(cost, actual, rows, 4)
        call(cost, actual, rows, 1, slower=20.0)
        call(cost, actual, rows, 1)
        assert ratios(cost, actual) == pytest.approx([1.0] * 5, rel=0.001)


def test_the_load_of_another_process_is_followed_and_not_saved() -> None:
    """It makes calls of more rows slower than others, and its end is as if the calls had become faster."""
    actual = sure(cost_of(MAIN_MS))
    cost = sure(cost_of(MAIN_MS))

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
    cost = cost_of(MAIN_MS, change=CHANGE)
    cost.observe([2], 256, 1.0)  # nobody knows what the call before was
    cost.observe([3], 256, 1.0)  # the number of rows has changed
    cost.observe((), 256, 1.0)  # something ran beside it
    cost.observe([2], 256, 1.0)
    cost.observe([200], 256, 1.0)  # more rows than were measured
    cost.observe([200], 256, 1.0)
    cost.observe([200], 256, 0.0)
    alone = dataclasses.replace(cost_of(MAIN_MS), one_call=False)
    for _ in range(9):
        alone.observe([2, 2], 256, 1.0)  # two calls, one after the other
    for each in (cost, alone):
        assert (each.near, each.scale) == (cost_of(MAIN_MS).near, 1.0)


class Healing(World):
    """A world whose costs are stored as `main` and `draft` say; calls are padded to learn what is unsure."""

    def __init__(self, noise: float, main: CallCost, draft: CallCost) -> None:
        super().__init__(noise, change=CHANGE, cost=main)
        self.costs = main, draft
        self.model.cost = draft
        known = Share(0.75, weight=100.0, memory=0.999)  # as after answers with clean costs
        self.controller.records.of_model(Greedy(), "draft").share = known
        self.job = job_of(self.main, main, self.draft, draft)

    def run(self, requests: Sequence[Answer]) -> list[float]:
        (request,), began = requests, 0.0
        while not request.ended:
            round_began = self.seconds
            step(self.main, Scheduler(self.main, RowBudget(2048), [*requests], cost=self.costs[0]))
            began = began or self.seconds
            self.job.spent(self.seconds - round_began)
        release(request)
        return [self.seconds - began]


def job_of(main: FakeBackend, cost: CallCost, draft: FakeBackend, draft_cost: CallCost) -> MeasureCosts:
    geometry = SimpleNamespace(geometry=SimpleNamespace(context_length=4000))
    models = {
        role: SimpleNamespace(
            backend=backend, cost=its, spec=SimpleNamespace(role=role, model=geometry, is_main=role == "main")
        )
        for role, backend, its in (("main", main, cost), ("draft", draft, draft_cost))
    }
    return MeasureCosts(cast("Any", models))


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


@pytest.mark.parametrize("calls", [0, UNKNOWN], ids=["guessed", "measured on a busy machine"])
@pytest.mark.parametrize(("main", "draft"), [
    (lambda _: 1.0, lambda _: 5.0),
    (lambda rows: 3.0 if rows > 2 else 1.0, lambda _: 1.0),
    (lambda rows: 0.5 if rows > 2 else 1.0, lambda _: 1.0),
], ids=["draft model five times too high", "rows too high", "rows too low"])  # fmt: skip
def test_after_500_tokens_costs_are_as_good_as_clean_ones(
    main: Callable[[int], float], draft: Callable[[int], float], calls: int
) -> None:
    world = Healing(NOISE, times(CLEAN[0], main, calls), times(CLEAN[1], draft, calls))
    world.decode(num=500)
    healed, seconds, _ = world.decode(num=LATER)
    assert healed == plain_token_ids()
    assert seconds < 1.03 * clean_seconds()
    found = [each.learned() for each in world.costs]
    assert ratios(found[0], CLEAN[0], (2, 3, 4)) == pytest.approx([1.0] * 3, rel=0.1)
    assert found[1](1) / found[0](2) == pytest.approx(CLEAN[1](1) / CLEAN[0](2), rel=0.1)


def test_what_two_measurements_agree_on_is_enough() -> None:
    actual = cost_of(MAIN_MS)
    cost, again = times(actual, lambda _: 1.0, ONE_LOAD), times(actual, lambda rows: 2.0 + (rows > 6), ONE_LOAD)
    assert cost.is_doubtful
    cost.take(again)
    assert cost.near == again.near
    assert cost.calls == (ENOUGH,) * 5 + (ONE_LOAD,) * 3  # only the speed of the machine was another
    assert cost.is_doubtful
    cost.take(again)
    assert not cost.is_doubtful
    guess = times(actual, lambda _: 1.0, 0)
    guess.take(times(actual, lambda _: 1.0, ONE_LOAD))
    assert set(guess.calls) == {ONE_LOAD}
    assert guess.is_doubtful
    call(guess, actual, 2, ENOUGH)
    assert guess.unsure_rows == []


def test_what_is_there_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SavedValue(tmp_path, {}, CallCost)
    monkeypatch.setattr(stored, "_file", lambda *_: file)

    def save(cost: CallCost) -> CallCost | None:
        stored.save_cost(cast("Any", None), cast("Any", None), cost)
        return file.read()

    assert save(times(CLEAN[1], lambda _: 1.0, 0)) is None  # a guess
    actual = sure(CLEAN[1])
    assert save(dataclasses.replace(actual, scale=3.0)) == actual
    cost = sure(times(actual, lambda _: 2.0))
    call(cost, actual, 1, 20)
    found = save(cost)
    assert found is not None
    assert ratios(found, actual, (1, 2)) == pytest.approx([1.0] * 2)
    monkeypatch.setattr(SavedValue, "write", lambda *_: pytest.fail("what is there is not written again"))
    save(cost)


def test_rows_of_answers_calls_are_padded_to_learn_what_they_take() -> None:
    steady = SteadyRows(CallCost((1, 16), (0.042, 0.072), (0.042, 0.072), change=CHANGE), RowRule(), 16)
    assert steady.next(2) == 2
    assert steady.pad(8)
    assert (steady.peek(2), steady.next(2), steady.next(2)) == (8, 8, 2)
    assert not steady.pad(2)
    assert not steady.pad(17)
    assert steady.pad(4)
    assert steady.next(6) == 6


def test_a_measurement_says_how_sure_it_is() -> None:
    """Turns that disagree, and a process that did not get its processors."""

    backend: Any = FakeBackend(4)
    backend.fingerprint = {"INFERENCE_NUM_THREADS": "1000000"}
    assert set(CallTimes(backend, (1, 2, 4)).measure().calls) == {UNKNOWN}  # a millionth of its threads' time


def test_an_idle_engine_measures_what_is_doubtful(openvino_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own thread."""
    monkeypatch.setattr(CallCost, "is_doubtful", property(lambda _: not taken))
    monkeypatch.setattr(MeasureCosts, "patience", 0.0)
    monkeypatch.setattr(measuring, "_PATIENCE_SECONDS", 0.0)
    done, taken = threading.Event(), list[str]()

    def measured(*_: Any, **__: Any) -> CallCost:
        taken.append(threading.current_thread().name)
        done.set()
        raise ValueError("enough")

    monkeypatch.setattr(measuring, "CallTimes", measured)
    with load_toy(openvino_bundle) as engine:
        engine.generate("abc", max_new_tokens=2, drafter=None)
        assert done.wait(20)
    assert {*taken} == {"outrider"}


# Calls keep their number of rows where idle rows cost less than a change of it, and say the same.


SECONDS = [n / 1000 for n in range(33)]
COST = CallCost((1, 32), (0.001, 0.032), (0.001, 0.032))


def rows_of(needs: Sequence[int], change: float, rule: RowRule | None = None) -> list[int]:
    steady = SteadyRows(dataclasses.replace(COST, change=change), rule or RowRule(), 32)
    found = []
    for need in needs:
        expected = steady.peek(need)
        assert steady.next(need) == steady.current == expected
        found.append(expected)
    return found


def test_idle_rows_stay_until_they_have_cost_as_much_as_a_change() -> None:
    assert rows_of([2, 6, 3, 5, 6, 2], 0.009) == [2, 6, 6, 6, 6, 6]
    assert rows_of([6, 2, 2, 2, 2], 0.009) == [6, 6, 6, 2, 2]  # 4 ms each
    assert rows_of([6, 2, 4, 4, 4, 4], 0.009) == [6, 6, 6, 6, 6, 4]  # 2 rows were exceeded since
    assert rows_of([300, 2], 0.009) == [300, 2]
    assert rows_of([6, 2, 6], 0.0) == [6, 2, 6]
    assert rows_of([8, 2], 1.0, RowRule(sequence=Rounding(2))) == [8, 8]
    assert rows_of([8, 7], 1.0, RowRule(sequence=Rounding(2))) == [8, 7]  # one row alone is another kernel's
    assert rows_of([16, 8, 8], 0.009, RowRule(call=Rounding(8, 8))) == [16, 16, 8]
    assert rows_of([8, 3], 0.009, RowRule(call=Rounding(8, 8))) == [8, 8]  # fewer than the rule has


@given(st.lists(st.integers(1, 32), min_size=1, max_size=60), st.floats(0, 0.05))
def test_it_costs_at_most_twice_what_all_changes_cost(needs: list[int], change: float) -> None:
    found = rows_of(needs, change)

    def extra(rows: Sequence[int]) -> float:
        changes = sum(a != b for a, b in zip([0, *rows], rows, strict=False))
        return change * changes + sum(SECONDS[n] - SECONDS[need] for n, need in zip(rows, needs, strict=True))

    assert all(n >= need for n, need in zip(found, needs, strict=True))
    assert extra(found) <= 2 * extra(needs) + 1e-9


@pytest.mark.parametrize("separate", [False, True])
def test_rows_have_the_same_bits(openvino_bundle: Bundle, *, separate: bool) -> None:
    """Beside idle rows, in calls of all sizes; of one sequence, and of two."""
    main = openvino_bundle.manifest.main
    text, rows, sizes = np.random.default_rng(0).integers(0, 39, 80).tolist(), [], list[list[int]]()
    for change in (None, 1.0):
        made = OpenVINOPaged(openvino_bundle.model_path(main), vocab_size=main.vocab_size, precision="f32")
        made.allocate(512)
        made.use(Exactness(rule=RowRule(Rounding(2), separate=separate)))
        if change is not None:
            made.keep_rows(dataclasses.replace(COST, near=(1e-9,) * 2, far=(1e-9,) * 2, change=change))
        slots = [slot for slot in (made.open(80), made.open(80)) if slot]
        found, sizes = [], [*sizes, []]
        for counts in ([2, 9], [2, 2], [4, 3], [2, 0], [3, 5], [40, 2], [2, 2], [2, 4]):
            chunks = [
                Chunk(slot, text[slot.length : slot.length + count], count, generated=count < 9)
                for slot, count in zip(slots, counts, strict=True)
                if count
            ]
            found += [*rows_of_call(made, *chunks)]
            sizes[-1].append(made._bound["input_ids"].size)
        rows.append(np.array(found))
    assert sizes == [[11, 4, 7, 2, 8, 42, 4, 6], [11, 11, 11, 11, 11, 42, 4, 6]]
    assert (rows[0] == rows[1]).all()


def test_a_change_is_measured_by_calls_in_turns() -> None:
    class Clock(FakeBackend):
        before = 0

    backend = Clock(8)
    with timer(backend, 2) as seconds:
        assert measure_change(seconds, [1]) == 0.0
        assert measure_change(seconds, [1, 2]) >= 0
    sizes = [sum(each) for each in backend.calls][2:]
    assert sizes[:8] == [1, 1, 2, 2, 1, 1, 2, 2]


def test_drafts_use_idle_rows() -> None:
    """A change that is dear is paid for once, and the text is the same."""
    found = {}
    for keeps in (False, True):
        world = World(0.2, change=0.02, keeps_rows=keeps)
        world.controller.records.of_model(Greedy(), "draft").share = Share(0.8, weight=300.0, memory=0.999)
        found[keeps] = speed_up(world, num=400)
    assert found[True] > 1.03 * found[False] > 1.15


def test_a_draft_model_that_keeps_its_rows_is_priced_so() -> None:
    world = World(0.0)
    cost, model = world.model.cost, world.model
    assert cost is not None
    cost.change = 0.005
    assert model.seconds_for([2], 256, 1) == cost.together([2], 256, 1) == cost(2) + 0.005
    steady = SteadyRows(cost, RowRule(), 32)
    world.draft.capabilities = dataclasses.replace(world.draft.capabilities, steady=steady)
    steady.next(2)
    assert model.seconds_for([1], 256, 1) == CallCost.__call__(cost, 2)
