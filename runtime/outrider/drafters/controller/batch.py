"""All answers of one round: what draft tokens cost in the batch, and how many are worth it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import mul

from outrider.models.cost.table import LONGEST, CallCost
from outrider.types import RowRule, SteadyRows

_SHARED_ROUNDS = 4  # that share the price of a change of rows, where later rounds are to have as many


@dataclass(frozen=True)
class Batch:
    """The answers of one round, and what draft tokens cost in their batch.

        batch.allot([[0.9, 0.8], [0.2]])    # draft tokens of the first answer, and of the second

    cost: of the main model's calls. together: number of answers. context: average tokens. plain: seconds of a round
    without drafts, for all answers. rate: tokens per second of all answers lately. least: rows of a plain call. before:
    rows of the main model's last call. change: extra seconds of a call with another number of rows than the one before.
    steady: pads calls further; None: nothing does. seconds: of calls by their rows, as far as they are known, where the
    machine's scale is 1. _added: what `_added_by` has returned.
    """

    cost: CallCost
    together: int
    context: float
    plain: float
    rate: float
    least: int
    before: int
    change: float
    steady: SteadyRows | None = None
    seconds: dict[int, float] = field(default_factory=dict)
    _added: dict[int, float] = field(init=False, default_factory=dict)

    def allot(self, chances: Sequence[Sequence[float]], limit: float = math.inf) -> list[int]:
        """How many draft tokens of each answer are worth their rows in this batch. The likeliest tokens come first.

        chances: each token's probability of acceptance if those before it are accepted. limit: seconds that their rows
        may add. Rows are priced together: in a full call few are worth it, and in a batch that is padded anyway some
        are free.
        """
        reached = [(kept, i) for i, each in enumerate(chances) for kept in accumulate(each, mul)]
        lengths = [0] * len(chances)
        most = sum(kept for kept, _ in reached)
        if most <= self.rate * self.cheapest:
            return lengths
        reached.sort(key=lambda token: -token[0])  # stable: a token comes after those before it
        best, best_value, value = list(lengths), 0.0, 0.0
        for kept, i in reached:
            value += kept
            lengths[i] += 1
            added = self.added(lengths)
            if added <= limit and value - self.rate * added > best_value:
                best, best_value = list(lengths), value - self.rate * added
            if most - self.rate * (added - 2 * self.change) <= best_value:
                break  # more rows do not cost less, even if all are accepted
        return best

    def first_part(self, chances: Sequence[float], length: int) -> int:
        """How many of `length` draft tokens to draft first, and the others once these have been found right.

        For the only answer. The tokens that are expected are the same: the row after the last draft token gives the
        next one. The others take another round, unless one of the first is wrong. Where rows cost much, that is less
        time on average than to verify all at once.

        chances: as in `allot`.
        """
        best, least = length, self.added([length])
        for count, reached in enumerate(accumulate(chances[:length], mul)):
            seconds = self.added([count]) + reached * (self.plain + self.added([length - count - 1]))
            if seconds < least:
                best, least = count, seconds
        return best

    def added(self, lengths: Sequence[int]) -> float:
        """Seconds that drafts of these lengths add to a plain round, if the next one is plain."""
        rows, cost = [k + 1 for k in lengths], self.cost
        if not cost.one_call:
            return max(cost.together(rows, self.context) - self.plain, 0.0)
        return self._added_by(cost.rule.num_rows(rows))

    def added_to_each(self, share: int) -> list[float]:
        """Seconds that drafts of 0, 1, … tokens add in `share` answers together, if later rounds have as many rows."""
        cost, others = self.cost, self.together - share
        if not cost.one_call:
            return [self.added([k] * share + [0] * others) for k in range(LONGEST + 1)]
        rows = totals = _totals(cost.rule, share, others)
        if self.steady:
            rows = [*map(self.steady.peek, totals)]
        least = self._seconds(self._free) + self.change * self._changes(self._free, stays=True)
        return [max(self._seconds(n) + self.change * self._changes(n, stays=True) - least, 0.0) for n in rows]

    def _added_by(self, total: int) -> float:
        """Extra seconds of one call with this many rows.

        A call with another number of rows than the one before costs more, and so does the next plain call.
        """
        if total not in self._added:  # many lengths make the same number of rows
            rows, free = self.steady.peek(total) if self.steady else total, self._free
            changes = self._changes(rows, stays=False) - self._changes(free, stays=False)
            seconds = self._seconds(rows) - self._seconds(free) + self.change * changes
            self._added[total] = max(seconds, 0.0)
        return self._added[total]

    def _seconds(self, rows: int) -> float:
        """Seconds of one call, where changes cost nothing."""
        if rows == self.least:
            return self.plain
        if rows not in self.seconds:
            self.seconds[rows] = self.cost.together([rows], self.context) / self.cost.scale
        return self.cost.scale * self.seconds[rows]

    @cached_property
    def _free(self) -> int:
        """Rows up to which draft tokens cost nothing: those that the plain call is padded to.

        Not in a batch: some answer has a use for them in nearly every round, so that the padding would stay for good.
        """
        return self.steady.peek(self.least) if self.steady and self.together == 1 else self.least

    def _changes(self, rows: int, *, stays: bool) -> float:
        """How often such a call changes the number of rows, with the plain call after it."""
        return (rows != self.before) / _SHARED_ROUNDS if stays else (rows != self.before) + (rows != self.least)

    @cached_property
    def cheapest(self) -> float:
        """The least seconds that any draft adds to a plain round."""
        if not self.cost.one_call:
            return 0.0
        one = self.cost.rule.num_rows([2] + [1] * (self.together - 1))
        return min(self._added_by(one), self._added_by(max(self.before, one)))


@lru_cache
def _totals(rule: RowRule, share: int, others: int) -> Sequence[int]:
    """Rows of calls in which `share` answers have drafts of 0, 1, … tokens, and others none."""
    return [rule.num_rows([k + 1] * share + [1] * others) for k in range(LONGEST + 1)]
