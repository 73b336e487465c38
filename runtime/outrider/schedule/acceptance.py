"""How likely draft tokens are to be kept."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

# Confidences are told apart where it matters: near certainty, one token in twenty decides how far a draft goes.
_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_PRIOR_WEIGHT = 4.0  # observations that a drafter's own word counts for
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

    _kept: list[float] = field(default_factory=lambda: [0.0] * (len(_EDGES) + 1))
    _seen: list[float] = field(default_factory=lambda: [0.0] * (len(_EDGES) + 1))

    def chance(self, confidence: float) -> float:
        """How likely a token with this confidence is to be kept, given that those before it are."""
        at = bisect.bisect_right(_EDGES, confidence)
        return (self._kept[at] + _PRIOR_WEIGHT * confidence) / (self._seen[at] + _PRIOR_WEIGHT)

    def observe(self, confidence: float, *, kept: bool) -> None:
        """Take in what became of a token."""
        at = bisect.bisect_right(_EDGES, confidence)
        self._kept[at] = _MEMORY * self._kept[at] + kept
        self._seen[at] = _MEMORY * self._seen[at] + 1


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

    def add(self, value: float) -> None:
        """Take in an observation."""
        self.weight *= self.memory
        self.mean += (value - self.mean) / (self.weight + 1)
        self.weight += 1
