"""Lossy acceptance: accepts more draft tokens, and the text no longer has the main model's distribution.

Only used if `sampling` names it. `outrider verify` reports each one's distance from the main model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from outrider.tokens.verifiers.rejection import TokenRejection, bonus, draft_probs, normalised, recovered, surplus
from outrider.types import Distribution, Draft, Noise, Outcome, Rows


@dataclass(frozen=True)
class Threshold(TokenRejection):
    """Lossy: accept a draft token x if target_probs(x) / draft_probs(x) is at least `threshold`.

    It is often said that threshold 1.0 is lossless. With the usual residual, it is not. Let the main model give
    [0.5, 0.5] and the draft model [0.8, 0.2]. Token 0 is always rejected (0.5 / 0.8 < 1) and token 1 always accepted
    (0.5 / 0.2 ≥ 1). The residual norm(max(0, [0.5, 0.5] − [0.8, 0.2])) is [0, 1]: token 1 again. The output is [0, 1].

    Rejected probability has to return when the recovered token is drawn. So here the residual subtracts accepted tokens
    only: norm(max(0, target_probs − draft_probs · accepted)), in the example [0.5, 0.3] / 0.8, which gives [0.5, 0.5].
    Of all residuals for this rule it is the nearest to the main model. At threshold 1 the distribution is exact. Below
    it, a position is off by the sum of draft_probs − target_probs over the accepted tokens where that is positive.
    Rejection sampling accepts more tokens than threshold 1.
    """

    lossless: ClassVar[bool] = False
    trees: ClassVar[bool] = False
    threshold: float = 0.5

    def verify(self, draft: Draft, rows: Rows, noise: Noise, position: int) -> Outcome:
        """Judge a draft that begins at `position`."""
        draft.check_chain(self)
        for i, token_id in enumerate(draft.token_ids):
            target = rows.distribution(i)
            accepted = self.accepted(target, draft_probs(draft, i))
            if accepted.prob(token_id) == 0:
                return Outcome.of_chain(i, recovered(normalised(target, surplus(target, accepted)), noise, position))
        return Outcome.of_chain(len(draft), bonus(rows.distribution(len(draft)), noise, position))

    def accepted(self, target: Distribution, drafted: Distribution) -> Distribution:
        """draft_probs of the tokens that are accepted; they need not sum to 1."""
        passes = probs_at(target, drafted.token_ids) >= self.threshold * drafted.probs
        return Distribution(drafted.token_ids[passes], drafted.probs[passes])


@dataclass(frozen=True)
class Typical(TokenRejection):
    """Lossy: accept a draft token x if target_probs(x) exceeds min(ε, √ε · exp(−entropy)).

    Typical acceptance (Cai et al. 2024, "Medusa", section 3.3.2; δ = √ε as there). A rejected token is replaced by one
    drawn from target_probs.
    """

    lossless: ClassVar[bool] = False
    trees: ClassVar[bool] = False
    threshold: float = 0.09

    def verify(self, draft: Draft, rows: Rows, noise: Noise, position: int) -> Outcome:
        """Judge a draft that begins at `position`."""
        draft.check_chain(self)
        for i, token_id in enumerate(draft.token_ids):
            target = rows.distribution(i)
            if target.prob(token_id) <= self.least_prob(target):
                return Outcome.of_chain(i, recovered(target, noise, position))
        return Outcome.of_chain(len(draft), bonus(rows.distribution(len(draft)), noise, position))

    def least_prob(self, target: Distribution) -> float:
        """The bound that a token's probability must exceed."""
        entropy = -float(np.sum(target.probs * np.log(target.probs)))
        return min(self.threshold, math.sqrt(self.threshold) * math.exp(-entropy))


def probs_at(target: Distribution, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """target_probs at token_ids, float64 [n]; 0 outside the support."""
    at = np.minimum(np.searchsorted(target.token_ids, token_ids), len(target.token_ids) - 1)
    return np.where(target.token_ids[at] == token_ids, target.probs[at], 0.0)
