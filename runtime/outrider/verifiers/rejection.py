"""Rejection sampling: the main model's distribution, whatever the draft's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.types import Distribution, Draft, Noise, Outcome

if TYPE_CHECKING:
    from outrider.types import Rows


@dataclass(frozen=True)
class Rejection:
    """Keep a draft token x with probability min(1, target_probs(x) / draft_probs(x)).

    The first rejected token is replaced by one drawn from `residual`; behind a draft that is kept whole, a bonus token
    is drawn from target_probs. Lossless in distribution (Leviathan et al. 2022, theorem 1 and appendix A.1; Chen et
    al. 2023, algorithm 2). The text depends on where rounds begin, so another draft length gives another text.
    """

    def draw(self, rows: Rows, i: int, noise: Noise, position: int) -> tuple[int, Distribution]:
        """A token drawn from draft_probs at row i, with a number of its own."""
        drafted = rows.distribution(i)
        return drafted.draw(noise.uniforms(position, "draft", i + 1)[i]), drafted

    def verify(self, draft: Draft, rows: Rows, noise: Noise, position: int) -> Outcome:
        """Judge a draft that begins at `position`."""
        uniforms = noise.uniforms(position, "accept", len(draft))
        for i, token_id in enumerate(draft.token_ids):
            target = rows.distribution(i)
            drafted = draft.probs[i] if draft.probs else _certain(token_id)
            if uniforms[i] * drafted.prob(token_id) >= target.prob(token_id):
                return Outcome(i, residual(target, drafted).draw(noise.uniforms(position, "recover", 1)[0]))
        bonus = rows.distribution(len(draft)).draw(noise.uniforms(position, "bonus", 1)[0])
        return Outcome(len(draft), bonus)


def residual(target: Distribution, drafted: Distribution) -> Distribution:
    """norm(max(0, target_probs − draft_probs)), what a recovered token is drawn from.

    Leviathan et al. 2022, section 2.3. Drawn only after a rejection, which has probability 0 where the two are equal;
    if rounding alone leaves nothing, it is the target itself.
    """
    at = np.searchsorted(target.token_ids, drafted.token_ids)
    at[at == len(target.token_ids)] = 0
    shared = target.token_ids[at] == drafted.token_ids
    probs = target.probs.copy()
    probs[at[shared]] -= drafted.probs[shared]
    np.maximum(probs, 0, out=probs)
    total = probs.sum()
    return Distribution(target.token_ids, probs / total) if total > 0 else target


def _certain(token_id: int) -> Distribution:
    """The distribution of a token that was chosen without looking at the round's noise."""
    return Distribution(np.array([token_id]), np.ones(1))
