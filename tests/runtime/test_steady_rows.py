"""Calls keep their number of rows where idle rows cost less than a change of it, and say the same."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calls import rows_of_call
from outrider.bundle import Bundle
from outrider.drafters.controller import Share
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.cost.measure import measure_change
from outrider.models.cost.table import CallCost
from outrider.testing import FakeBackend
from outrider.tokens.verifiers import Greedy
from outrider.types import Chunk, Exactness, Rounding, RowRule, SteadyRows
from virtual_time import World, speed_up

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
    assert measure_change(backend, [1]) == 0.0
    assert measure_change(backend, [1, 2]) >= 0
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
