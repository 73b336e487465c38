"""Choosing devices by costs that are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outrider.controller.batch import best_length
from outrider.measure import LONGEST, Contention, PassCost
from outrider.measure.overlap import ACCEPTANCE
from outrider.placement import MARGIN, PairCost, choose

if TYPE_CHECKING:
    from outrider.placement import Pair


def cost(one: float, sixteen: float | None = None) -> PassCost:
    seconds = (one, sixteen or one)
    return PassCost((1, 16), seconds, seconds)


SLOW, QUICK, DRAFT = cost(0.100, 0.150), cost(0.040, 0.060), cost(0.010)


def test_the_rate_is_the_one_that_the_controller_settles_at() -> None:
    """At the best rate, the best draft is worth just what a round costs (Dinkelbach 1967)."""
    pair = PairCost(QUICK, DRAFT)
    rate = pair.rate()
    plain = QUICK(1)
    costs = [rate * (QUICK(k + 1) - plain + k * DRAFT(1)) for k in range(LONGEST + 1)]
    value, length = best_length([ACCEPTANCE] * LONGEST, costs)
    assert length > 0
    assert 1 + value == pytest.approx(rate * plain)


def test_a_draft_model_that_does_not_pay_costs_nothing() -> None:
    assert PairCost(QUICK, cost(0.050)).rate() == PairCost(QUICK, None).rate() == pytest.approx(1 / 0.040)


def test_the_quickest_pair_is_chosen() -> None:
    costs: dict[Pair, PairCost] = {
        ("CPU", "CPU"): PairCost(SLOW, DRAFT),
        ("GPU", "CPU"): PairCost(QUICK, DRAFT),
        ("GPU", "GPU"): PairCost(QUICK, cost(0.012)),
    }
    chosen = choose(costs)
    assert (chosen.main, chosen.draft) == ("GPU", "CPU")
    assert chosen.tokens_per_second == pytest.approx(costs["GPU", "CPU"].rate())
    assert chosen.why.index("GPU and CPU") < chosen.why.index("GPU and GPU") < chosen.why.index("CPU and CPU")


def test_the_first_stays_where_others_are_hardly_quicker() -> None:
    hardly, clearly = (cost(0.100 / (1 + share * (MARGIN - 1))) for share in (0.9, 1.1))
    for other, expected in ((hardly, "CPU"), (clearly, "GPU")):
        chosen = choose({("CPU", None): PairCost(cost(0.100), None), ("GPU", None): PairCost(other, None)})
        assert (chosen.main, chosen.draft) == (expected, None)


def test_drafting_ahead_pays_where_the_devices_do_not_mind_each_other() -> None:
    """A pair that shares its memory is quicker by 7 % in turns, and by no more than 5 % at the same time."""
    shared = PairCost(QUICK, cost(0.0080), contention=Contention(1.9, 1.9))
    apart = PairCost(QUICK, cost(0.0102), contention=Contention(1.0, 1.0))
    costs: dict[Pair, PairCost] = {("GPU", "NPU"): apart, ("GPU", "GPU"): shared}
    assert choose(costs).draft == "GPU"
    assert choose(costs, overlap=True).draft == "NPU"
    assert apart.rate(overlap=True) > apart.rate() == apart.rate(overlap=False)
    assert shared.rate(overlap=True) == shared.rate()  # never worse: it need not


def test_drafting_ahead_hides_a_draft_that_is_always_right() -> None:
    pair = PairCost(cost(0.040), cost(0.002), Contention(1.0, 1.0))
    assert pair.rate(1.0, overlap=True) == pytest.approx((LONGEST + 1) / 0.041)  # half a call of its own is waited for


def test_nothing_to_choose_from_is_an_error() -> None:
    with pytest.raises(ValueError, match="no pair"):
        choose({})
