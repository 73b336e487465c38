"""What mask tokens are worth: the target pass reads them now, and gains by them in the round that follows.

A round's value is counted with the draft that it leaves to the next one, less the rows that this draft will take. So
the price now and the gain later stand in one sum, which is that of a round in the long run.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

from outrider.drafters.controller.batch import best_length


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Mask tokens behind the rows of a draft, and the draft of the next round that they give.

        ahead = Lookahead.of(chance=0.4, most=4, rate=20.0, check=check)
        ahead.num_masks([0.4, 0.4])    # behind each of three rows

    value: of the next draft in tokens, less those that its rows cost. count: its tokens, and so the masks behind a row.
    most: the most that it may have. rate: tokens per second. check: for k tokens, the seconds that they add to the
    target pass. fork: seconds that a branch adds besides its rows.
    """

    value: float
    count: int
    most: int
    rate: float
    check: Seq[float]
    fork: float = 0.0

    @classmethod
    def of(cls, chance: float, most: int, rate: float, check: Seq[float], fork: float = 0.0) -> Lookahead:
        """chance: of each token of the next draft, which has up to `most` tokens, to be accepted."""
        value, count = best_length([chance] * most, [rate * seconds for seconds in check])
        return cls(value, count, most, rate, check, fork)

    @property
    def is_vain(self) -> bool:
        """Whether masks would not pay even if the whole next draft were right. Then there is nothing to find out."""
        return Lookahead.of(1.0, self.most, self.rate, self.check, self.fork).plan([])[1] <= 0

    def num_masks(self, chances: Seq[float]) -> list[int]:
        """For each row of a chain how many masks are worth it behind that row; see `plan`."""
        return self.plan(chances)[0]

    def plan(self, chances: Seq[float]) -> tuple[list[int], float]:
        """For each row of a chain the masks that are worth it behind that row, and what they gain, in tokens.

        chances: each token's probability of acceptance if those before it are accepted. The masks behind a row count if
        the draft is accepted up to there, and no farther. Behind the last row they go on with the chain. Behind another
        row they are a branch, which repeats the tokens before it.
        """
        reached = [1.0, *accumulate(chances, mul)]
        ends = [here - there for here, there in pairwise([*reached, 0.0])]
        wanted, rows, gain = [0] * len(ends), len(chances), 0.0
        for row in sorted(range(len(ends)), key=lambda row: -ends[row]) if self.count else ():
            is_branch = row < len(chances)
            more = rows + self.count + (row + 1 if is_branch else 0)
            if more >= len(self.check):
                continue
            seconds = self.check[more] - self.check[rows] + (self.fork if is_branch else 0.0)
            worth = ends[row] * self.value - self.rate * seconds
            if worth > 0:
                wanted[row], rows, gain = self.count, more, gain + worth
        return wanted, gain

    def best(self, chances: Seq[float]) -> float:
        """The largest value of a round, in tokens: of a chain with these chances, or its beginning, and its masks."""
        values, kept = [self.plan([])[1]], accumulate(accumulate(chances, mul))
        for length, tokens in enumerate(kept, 1):
            if length < len(self.check):
                values.append(tokens - self.rate * self.check[length] + self.plan(chances[:length])[1])
        return max(values)
