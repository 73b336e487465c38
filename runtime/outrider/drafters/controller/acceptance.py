"""How likely draft tokens are to be accepted."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

# Bins of confidence. They are narrow near 1, where small differences decide how long a draft should be.
_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_PRIOR_WEIGHT = 4.0  # observations that a drafter's own confidence counts for
_MAX_COUNT = 1 / (1 - 0.998) + 1  # largest possible count
_MEMORY = 0.998  # weight of earlier observations after another one


@dataclass(slots=True)
class Acceptance:
    """Calibrates a drafter's confidences by the outcomes of its tokens.

        acceptance = Acceptance()
        acceptance.observe(0.8, accepted=True)
        acceptance.chance(0.8)

    At first the confidence itself is the estimate, then more and more the accepted share of tokens with a similar
    confidence. Only verified tokens count, not those after a rejected one.

    accepted, seen: counts of accepted and of verified tokens, by bins of confidence; 0 if neither is given.
    """

    accepted: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_bins = len(_EDGES) + 1
        if not self.accepted and not self.seen:  # a file that has one of them alone is of another version
            self.accepted, self.seen = [0.0] * num_bins, [0.0] * num_bins
        counts = list(zip(self.accepted, self.seen, strict=True))
        if len(counts) != num_bins or not all(0 <= accepted <= seen <= _MAX_COUNT for accepted, seen in counts):
            raise ValueError(f"there are {num_bins} counts of accepted tokens, and as many of verified ones")

    def chance(self, confidence: float) -> float:
        """The probability that a token with this confidence is accepted if those before it are."""
        at = bisect.bisect_right(_EDGES, confidence)
        return (self.accepted[at] + _PRIOR_WEIGHT * confidence) / (self.seen[at] + _PRIOR_WEIGHT)

    def observe(self, confidence: float, *, accepted: bool) -> None:
        """Take in the outcome of a token."""
        at = bisect.bisect_right(_EDGES, confidence)
        self.accepted[at] = _MEMORY * self.accepted[at] + accepted
        self.seen[at] = _MEMORY * self.seen[at] + 1


@dataclass(slots=True)
class Luck:
    """How much more or less often than expected events have happened recently.

    weight: expected events that the prior factor of 1 counts for. memory: weight of earlier events after another one.
    """

    weight: float
    memory: float
    happened: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        """How many times as often as expected."""
        return (self.happened + self.weight) / (self.expected + self.weight)

    def adjust(self, chance: float) -> float:
        """A probability, multiplied by the factor; by a factor above 1, its odds: a likely event stays uncertain."""
        factor = self.factor
        return chance * factor if factor <= 1 else chance * factor / (1 - chance + chance * factor)

    def add(self, chance: float, *, happened: bool) -> None:
        """Take in an event and its probability."""
        self.happened = self.memory * self.happened + happened
        self.expected = self.memory * self.expected + chance


@dataclass(slots=True)
class Share:
    """A running mean that starts from a prior and forgets.

    weight: observations that the mean counts for. memory: the part of it that stays after another observation.
    """

    mean: float
    weight: float
    memory: float

    def __post_init__(self) -> None:
        if not (0 <= self.mean <= 1e9 and 0 <= self.weight <= 1e6 and 0 < self.memory <= 1):
            raise ValueError("a running mean has a mean and a weight of at least 0")

    def add(self, value: float) -> None:
        """Take in an observation."""
        self.weight *= self.memory
        self.mean += (value - self.mean) / (self.weight + 1)
        self.weight += 1
