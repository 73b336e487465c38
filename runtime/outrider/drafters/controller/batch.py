"""All answers of one round: what draft tokens cost in the batch, and how many are worth it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import mul

from outrider.models.tuning.measure import LONGEST, PassCost
from outrider.types import Drafter, SteadyRows

_ROUNDS = 4  # that share the price of a change of rows, where later rounds are to have as many


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

    cost: PassCost
    together: int
    context: float
    plain: float
    rate: float
    least: int
    before: int
    change: float
    steady: SteadyRows | None = None
    seconds: dict[int, float] = field(default_factory=dict)
    _added: dict[tuple[int, bool], float] = field(init=False, default_factory=dict)

    def allot(self, chances: Seq[Seq[float]]) -> list[int]:
        """How many draft tokens of each answer are worth their rows in this batch. The likeliest tokens come first.

        chances: each token's probability of acceptance if those before it are accepted. Rows are priced together: in a
        full call few are worth it, and in a batch that is padded anyway some are free.
        """
        reached = [(kept, i) for i, each in enumerate(chances) for kept in accumulate(each, mul)]
        lengths = [0] * len(chances)
        most = sum(kept for kept, _ in reached)
        if most <= self.rate * self.cheapest:
            return lengths
        reached.sort(key=lambda token: -token[0])  # stable: a token comes behind those before it
        best, best_value, value = list(lengths), 0.0, 0.0
        for kept, i in reached:
            value += kept
            lengths[i] += 1
            added = self.added(lengths)
            if value - self.rate * added > best_value:
                best, best_value = list(lengths), value - self.rate * added
            if most - self.rate * (added - 2 * self.change) <= best_value:
                break  # more rows do not cost less, even if all are accepted
        return best

    def first_part(self, chances: Seq[float], length: int) -> int:
        """How many of `length` draft tokens to draft first, and the others once these have been found right.

        For the only answer. The tokens that are expected are the same: the row behind the last draft token gives the
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

    def added(self, lengths: Seq[int], *, stays: bool = False) -> float:
        """Seconds that drafts of these lengths add to a plain round.

        stays: whether later rounds are to have as many rows; otherwise the next one is plain.
        """
        rows, cost = [k + 1 for k in lengths], self.cost
        if not cost.one_call:
            return max(cost.together(rows, self.context) - self.plain, 0.0)
        return self._added_by(cost.rule.num_rows(rows), stays=stays)

    def _added_by(self, total: int, *, stays: bool = False) -> float:
        """Extra seconds of one call with this many rows.

        A call with another number of rows than the one before costs more, and so does the next plain call.
        """
        if (total, stays) not in self._added:  # many lengths make the same number of rows
            rows, free = self.steady.peek(total) if self.steady else total, self._free
            changes = self._changes(rows, stays=stays) - self._changes(free, stays=stays)
            seconds = self._seconds(rows) - self._seconds(free) + self.change * changes
            self._added[total, stays] = max(seconds, 0.0)
        return self._added[total, stays]

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

    @property
    def num_idle(self) -> int:
        """Draft tokens that have rows for nothing."""
        return min(self._free - self.together, LONGEST) if self.steady else 0

    def _changes(self, rows: int, *, stays: bool) -> float:
        """How often such a call changes the number of rows, with the plain call behind it."""
        return (rows != self.before) / _ROUNDS if stays else (rows != self.before) + (rows != self.least)

    @cached_property
    def cheapest(self) -> float:
        """The least seconds that any draft adds to a plain round."""
        if not self.cost.one_call:
            return 0.0
        one = self.cost.rule.num_rows([2] + [1] * (self.together - 1))
        return min(self._added_by(one), self._added_by(max(self.before, one)))


@dataclass(frozen=True, slots=True)
class ModelPrice:
    """What drafts of a model cost each of the `share` answers that it drafts for at the same time.

    call: seconds of its call. at_once: whether a draft takes one call; otherwise each token takes one. check: seconds
    that 0, 1, … draft tokens add to the target pass. most: tokens of its longest draft.
    """

    share: int
    call: float
    at_once: bool
    check: list[float]
    most: int

    @classmethod
    def of(cls, model: Drafter, batch: Batch, share: int) -> ModelPrice:
        """The price if the model drafts for `share` of the batch's answers."""
        others = [0] * (batch.together - share)
        check = [batch.added([k] * share + others, stays=True) / share for k in range(LONGEST + 1)]
        return cls(
            share,
            model.seconds_for([1] * share, batch.context) / share,
            model.at_once,
            check,
            min(model.most_tokens or LONGEST, LONGEST),
        )

    @property
    def step(self) -> float:
        """Seconds to draft a token behind the first."""
        return 0.0 if self.at_once else self.call

    def drafting(self, count: int, num_ahead: int = 0) -> float:
        """Seconds to draft so many tokens, of which `num_ahead` were drafted ahead."""
        if not count or (num_ahead and self.at_once):
            return 0.0
        return self.step * (count - 1) + (0.0 if num_ahead else self.call)

    def pays(self, chance: float, limit: int, rate: float) -> bool:
        """Whether a draft is worth it. chance: of each token, to be accepted. rate: tokens per second."""
        costs = [
            rate * (seconds + self.drafting(k)) for k, seconds in enumerate(self.check[: min(limit, self.most) + 1])
        ]
        return best_length([chance] * (len(costs) - 1), costs)[1] > 0


def row_prices(batch: Batch) -> list[float]:
    """Seconds of the rows of one answer's 1, 2, … draft tokens, where the machine's scale is 1; no more than they cost.

    A row's price is the average of its own and of those behind it that make that least: padding is free.
    """
    cost, others = batch.cost, [1] * (batch.together - 1)
    seconds = [cost.together([k + 1, *others], batch.context) / cost.scale for k in range(LONGEST + 1)]
    return [
        max(min((seconds[n] - seconds[k]) / (n - k) for n in range(k + 1, LONGEST + 1)), 0.0) for k in range(LONGEST)
    ]


def best_length(chances: Seq[float], costs: Seq[float]) -> tuple[float, int]:
    """The largest value of a draft, in tokens, and the length that has it.

    chances: each token's probability of acceptance if those before it are accepted. costs: in tokens, of 0, 1, …
    tokens.
    """
    best, length, kept, value = 0.0, 0, 1.0, 0.0
    for k, chance in enumerate(chances[: len(costs) - 1], 1):
        kept *= chance
        value += kept
        if value - costs[k] > best:
            best, length = value - costs[k], k
    return best, length
