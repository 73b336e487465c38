"""Rules that end a draft."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq


@dataclass(frozen=True, slots=True)
class ConfidenceThreshold:
    """Wants more while the last token was drafted with at least this confidence.

    OpenVINO GenAI's `assistant_confidence_threshold`. The token that ends a draft is part of it.
    """

    threshold: float

    def wants_more(self, confidences: Seq[float]) -> bool:
        """Whether another token is wanted."""
        return not confidences or confidences[-1] >= self.threshold


@dataclass(frozen=True, slots=True)
class WorthIt:
    """Wants more while the next token is worth its cost: its probability of acceptance against its seconds.

    chance: a token's probability of acceptance, by its confidence. next_chance: that of a token that is not drawn yet.
    rate: tokens per second. step: seconds to draft a token. check: for k tokens, the seconds that they add to the
    target pass. num_ahead: tokens that were drafted ahead.
    """

    chance: Callable[[float], float]
    next_chance: float
    rate: float
    step: float
    check: Seq[float]
    num_ahead: int = 0

    def wants_more(self, confidences: Seq[float]) -> bool:
        """Whether the next token is worth its cost. Later tokens are worth less."""
        k = len(confidences)
        if k + 1 >= len(self.check):
            return False
        kept = prod(self.chance(confidence) for confidence in confidences) * self.next_chance
        step = self.step if k >= self.num_ahead else 0.0
        return kept > self.rate * (step + self.check[k + 1] - self.check[k])
