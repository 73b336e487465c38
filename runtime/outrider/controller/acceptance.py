"""How likely draft tokens are to be kept."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field

# Confidences are told apart where it matters: near certainty, one token in twenty decides how far a draft goes.
_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_PRIOR_WEIGHT = 4.0  # observations that a drafter's own word counts for
_MOST = 1 / (1 - 0.998) + 1  # observations that a count can come to
_MEMORY = 0.998  # of what was observed, how much the next observation leaves


@dataclass(slots=True)
class Acceptance:
    """Calibrates a drafter's confidences with what becomes of its tokens.

        acceptance = Acceptance()
        acceptance.observe(0.8, kept=True)
        acceptance.chance(0.8)

    A drafter is taken at its word at first, then more and more at its record among tokens of like confidence. Only
    tokens that were judged count: those behind a rejected one were never compared with what the main model says.
    """

    kept: list[float] = field(default_factory=lambda: [0.0] * (len(_EDGES) + 1))
    seen: list[float] = field(default_factory=lambda: [0.0] * (len(_EDGES) + 1))

    def __post_init__(self) -> None:
        counts = list(zip(self.kept, self.seen, strict=True))
        if len(counts) != len(_EDGES) + 1 or not all(0 <= kept <= seen <= _MOST for kept, seen in counts):
            raise ValueError(f"there are {len(_EDGES) + 1} counts, of what was kept and of what was seen")

    def chance(self, confidence: float) -> float:
        """How likely a token with this confidence is to be kept, given that those before it are."""
        at = bisect.bisect_right(_EDGES, confidence)
        return (self.kept[at] + _PRIOR_WEIGHT * confidence) / (self.seen[at] + _PRIOR_WEIGHT)

    def careful(self, confidence: float) -> float:
        """The same, a standard deviation lower: what is not known yet is worth little."""
        at = bisect.bisect_right(_EDGES, confidence)
        return lower_bound(self.chance(confidence), self.seen[at])

    def observe(self, confidence: float, *, kept: bool) -> None:
        """Take in what became of a token."""
        at = bisect.bisect_right(_EDGES, confidence)
        self.kept[at] = _MEMORY * self.kept[at] + kept
        self.seen[at] = _MEMORY * self.seen[at] + 1


def lower_bound(mean: float, num_seen: float) -> float:
    """A chance that was estimated from so many observations, a standard deviation lower."""
    return max(mean - math.sqrt(mean * (1 - mean) / (1 + num_seen)), 0.0)


@dataclass(slots=True)
class Luck:
    """How much more, or less, often than expected things have happened lately.

    weight: expected events that the assumption of no difference counts for; memory: how much the next one leaves.
    """

    weight: float
    memory: float
    happened: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        """What a chance is to be multiplied by."""
        return (self.happened + self.weight) / (self.expected + self.weight)

    def add(self, chance: float, *, happened: bool) -> None:
        """Take in what became of a chance."""
        self.happened = self.memory * self.happened + happened
        self.expected = self.memory * self.expected + chance


@dataclass(slots=True)
class Share:
    """A running mean that begins at a prior and forgets.

    weight: observations that what is known counts for; memory: how much of it the next one leaves.
    """

    mean: float
    weight: float
    memory: float

    def __post_init__(self) -> None:
        if not (0 <= self.mean <= 1e9 and 0 <= self.weight <= 1e6 and 0 < self.memory <= 1):
            raise ValueError("a running mean has a mean and a weight of at least 0")

    @property
    def careful(self) -> float:
        """The mean of chances, a standard deviation lower."""
        return lower_bound(self.mean, self.weight)

    def add(self, value: float) -> None:
        """Take in an observation."""
        self.weight *= self.memory
        self.mean += (value - self.mean) / (self.weight + 1)
        self.weight += 1
