"""Choosing devices for the main and the draft model by what their calls cost there.

    choose({("CPU", "CPU"): PairCost(main, draft), ("GPU", "CPU"): PairCost(other, draft)})

Nothing is measured here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from outrider.measure.cost import LONGEST
from outrider.measure.overlap import ACCEPTANCE, rate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outrider.measure.cost import Contention, PassCost

MARGIN = 1.05  # how much quicker a pair has to be than one before it in the list: less is noise

Pair: TypeAlias = tuple[str, str | None]  # devices of the main and the draft model; None: no draft model


@dataclass(frozen=True, slots=True)
class PairCost:
    """What the calls of two models cost on two devices, alone and at the same time: None where that is not known."""

    main: PassCost
    draft: PassCost | None
    contention: Contention | None = None

    def rate(self, acceptance: float = ACCEPTANCE, *, overlap: bool = False) -> float:
        """Tokens a second, with the draft length that is best where every draft token has this chance to be kept.

        The length that makes the ratio of tokens to seconds largest is the one that `best_length` finds at the rate
        that it earns (Dinkelbach 1967). overlap: the draft model may draft ahead while the main model checks.
        """
        best = 1 / self.main(1)
        if self.draft is None:
            return best
        for length in range(1, LONGEST + 1):
            best = max(best, rate(self.main, self.draft, length, acceptance))
            if overlap and self.contention:
                best = max(best, rate(self.main, self.draft, length, acceptance, self.contention))
        return best


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the models run, and why there, in a sentence. tokens_per_second: expected; None where none was measured."""

    main: str
    draft: str | None
    why: str
    tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        if self.tokens_per_second is not None and not 0 < self.tokens_per_second < math.inf:
            raise ValueError("tokens a second are a number above 0")


def choose(costs: Mapping[Pair, PairCost], *, overlap: bool = False) -> Placement:
    """The pair of devices with the highest rate. Of those that are alike within `MARGIN` the one that comes first.

    Raises:
        ValueError: for no pair at all.
    """
    if not costs:
        raise ValueError("there is no pair of devices to choose from")
    rates = {pair: cost.rate(overlap=overlap) for pair, cost in costs.items()}
    best, *others = rates
    for pair in others:
        if rates[pair] > MARGIN * rates[best]:
            best = pair
    listed = ", ".join(f"{named(*pair)} {rate:.1f}" for pair, rate in sorted(rates.items(), key=lambda r: -r[1]))
    why = f"measured, tokens a second expected of main and draft device: {listed}"
    return Placement(*best, why=why, tokens_per_second=rates[best])


def named(main: str, draft: str | None) -> str:
    """A pair of devices, for a sentence."""
    return main if draft is None else f"{main} and {draft}"
