"""Rules that end a draft."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Chain:
    """A rule without second candidates."""

    __slots__ = ()
    wants_branches = False

    def branch_places(self, confidences: Sequence[float]) -> list[int]:  # noqa: ARG002
        """None."""
        return []


@dataclass(frozen=True, slots=True)
class ConfidenceThreshold(_Chain):
    """Wants more while the last token was drafted with at least this confidence.

    OpenVINO GenAI's `assistant_confidence_threshold`. The token that ends a draft is part of it.
    """

    threshold: float

    def wants_more(self, confidences: Sequence[float]) -> bool:
        """Whether another token is wanted."""
        return not confidences or confidences[-1] >= self.threshold


@dataclass(frozen=True, slots=True)
class WorthIt:
    """Wants more while the next token is worth its cost: its probability of acceptance against its seconds.

    chance: a token's probability of acceptance, by its confidence. next_chance: that of a token that is not drawn yet.
    rate: tokens per second. step: seconds to draft a token. check: for k tokens, the seconds that they add to the
    target pass. longest: tokens of the longest chain. num_ahead: tokens that were drafted ahead. second: the chance
    that a second candidate is accepted where the first is rejected; 0 without any. fork: seconds that a branch adds
    besides its rows.
    """

    chance: Callable[[float], float]
    next_chance: float
    rate: float
    step: float
    check: Sequence[float]
    longest: int
    num_ahead: int = 0
    second: float = 0.0
    fork: float = 0.0

    @property
    def wants_branches(self) -> bool:
        """Whether a second candidate of the first token could be worth its two rows."""
        rows = self.check[min(3, len(self.check) - 1)] - self.check[min(1, len(self.check) - 1)]
        return self.second > self.rate * (rows + self.fork)

    def branch_places(self, confidences: Sequence[float]) -> list[int]:
        """The places at which a second candidate is worth its branch, which repeats the tokens before it.

        It is accepted if those before it are, the first candidate is not, and it is the right one.
        """
        places, count, reached = list[int](), len(confidences), 1.0
        for i, confidence in enumerate(confidences):
            chance = self.chance(confidence)
            after = count + i + 2
            if after >= len(self.check):
                break
            cost = self.check[after] - self.check[count] + self.fork
            if reached * (1 - chance) * self.second > self.rate * cost:
                places.append(i)
                count = after
            reached *= chance
        return places

    def wants_more(self, confidences: Sequence[float]) -> bool:
        """Whether the next token is worth its cost, or the next few are."""
        k = len(confidences)
        kept, value = prod(self.chance(confidence) for confidence in confidences), 0.0
        for n in range(k + 1, self.longest + 1):  # rows may cost less after a number that costs more
            kept *= self.next_chance
            value += kept
            steps = n - max(k, min(n, self.num_ahead))
            if value > self.rate * (steps * self.step + self.check[n] - self.check[k]):
                return True
        return False
