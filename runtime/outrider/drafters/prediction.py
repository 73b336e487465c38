"""What a drafter gains: predicted from what calls cost on this machine, and from how often its tokens are accepted.

    costs = Costs.of(engine.costs["main"], engine.draft_models["eagle3"])
    predict([0.6, 0.5, 0.4], costs).speed_up
    needed(1.0, costs)      # the acceptance from which it pays

A prediction leaves out drafts from trees, copies, the choice of draft length round by round, and sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from outrider.models.cost.table import LONGEST, NEAR, CallCost
from outrider.types import Drafter

_UNREAD_TOKENS = 2  # committed tokens that a drafter reads before it drafts: about a round's


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine. check: of a target pass with 1, 2, … rows. draft: of a draft of 1, 2, … tokens."""

    check: list[float]
    draft: list[float]

    @classmethod
    def of(cls, main: CallCost, drafter: Drafter) -> Costs:
        """As the controller prices them. main: of the main model's calls. drafter: one with a model of its own."""
        check = [main(rows, NEAR) for rows in range(1, LONGEST + 2)]
        first, step = drafter.seconds_for([_UNREAD_TOKENS], NEAR), drafter.seconds_for([1], NEAR)
        longest = min(drafter.most_tokens or LONGEST, LONGEST)
        return cls(check, [first if drafter.at_once else first + k * step for k in range(longest)])

    def break_even(self, num_draft_tokens: int) -> float:
        """Tokens per round at which drafts of this length are as fast as plain decoding."""
        return (self.check[num_draft_tokens] + self.draft[num_draft_tokens - 1]) / self.check[0]


@dataclass(frozen=True)
class SpeedPrediction:
    """num_draft_tokens: a round, that pay most; 0: plain decoding is faster. speed_up: over plain decoding."""

    num_draft_tokens: int
    tokens_per_round: float
    speed_up: float


def predictions(acceptance: Sequence[float], costs: Costs) -> list[SpeedPrediction]:
    """What drafts of 1, 2, … tokens give, slower than plain decoding or not.

    acceptance: of place 1, 2, …, each if those before it are accepted. A round of k draft tokens gives
    1 + a1 + a1 a2 + … tokens for the time of the draft and of a target pass of k + 1 rows (Leviathan et al. 2022,
    section 3).
    """
    most = min(len(costs.draft), len(costs.check) - 1)
    tokens = [1 + kept for kept in accumulate(accumulate(acceptance[:most], mul))]
    return [SpeedPrediction(k, each, each / costs.break_even(k)) for k, each in enumerate(tokens, 1)]


def best_draft(acceptance: Sequence[float], costs: Costs) -> SpeedPrediction:
    """The number of draft tokens that pays most, and what comes of it, be it slower than plain decoding."""
    return max(predictions(acceptance, costs), key=lambda each: each.speed_up)


def predict(acceptance: Sequence[float], costs: Costs) -> SpeedPrediction:
    """The same, or plain decoding where that is faster."""
    return max([SpeedPrediction(0, 1.0, 1.0), *predictions(acceptance, costs)], key=lambda each: each.speed_up)


def needed(speed_up: float, costs: Costs, num_draft_tokens: int | None = None) -> float | None:
    """The acceptance at every place that gives this speed-up; None if none does, as drafts cost too much here.

    num_draft_tokens: a round; by default as many as pay most.
    """
    lengths = slice(None) if num_draft_tokens is None else slice(num_draft_tokens - 1, num_draft_tokens)
    for share in (percent / 100 for percent in range(101)):
        found = predictions([share] * len(costs.draft), costs)[lengths]
        if any(each.speed_up >= speed_up for each in found):
            return share
    return None
