"""Rejection sampling: the text has the main model's distribution, for any draft distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from outrider.types import Distribution, Draft, Noise, Outcome, Rows


@dataclass(frozen=True)
class TokenRejection:
    """Accept a draft token x with probability min(1, target_probs(x) / draft_probs(x)), one token after the other.

    The first rejected token is replaced by one drawn from `residual`. After a draft that was accepted whole, a bonus
    token is drawn from target_probs. Lossless in distribution (Leviathan et al. 2022, theorem 1 and appendix A.1; Chen
    et al. 2023, algorithm 2). The text depends on where rounds begin, so another draft length gives another text.

    Of several candidates for a position, one after the other is tried, against the residual that the rejection of those
    before it leaves: target ← norm(max(0, target_probs − draft_probs)). So each stage is the method above for another
    target, and what it gives has that target's distribution, whatever was rejected (Miao et al. 2024, "SpecInfer",
    algorithm 2). Siblings are drawn without replacement: draft_probs of each are those without the tokens before it. So
    one of them is always accepted if they are all that the draft model has, and the main model has no others (Jeon et
    al. 2024, "Recursive speculative decoding").
    """

    lossless: ClassVar[bool] = True
    trees: ClassVar[bool] = True

    def draw(self, rows: Rows, i: int, noise: Noise, position: int) -> tuple[int, Distribution]:
        """A token drawn from draft_probs at row i, with its own random number."""
        return self.draw_several(rows, i, noise, position, 1)[0]

    def draw_several(
        self, rows: Rows, i: int, noise: Noise, position: int, count: int
    ) -> list[tuple[int, Distribution]]:
        """Tokens drawn from draft_probs at row i without replacement, each with its own random number."""
        drafted, drawn = rows.distribution(i), list[tuple[int, Distribution]]()
        for sibling in range(min(count, len(drafted.token_ids))):
            if drawn:
                drafted = drafted.without(drawn[-1][0])
            purpose = f"draft, sibling {sibling}" if sibling else "draft"
            drawn.append((drafted.draw(noise.uniforms(position, purpose, i + 1)[i]), drafted))
        return drawn

    def verify(self, draft: Draft, rows: Rows, noise: Noise, position: int) -> Outcome:
        """Judge a draft that begins at `position`. No row after a rejection is read."""
        uniforms = noise.uniforms(position, "accept", len(draft))
        path, at = list[int](), -1
        while candidates := draft.children(at):
            target = rows.distribution(at + 1)
            for i in candidates:
                token_id, drafted = draft.token_ids[i], draft_probs(draft, i)
                if uniforms[i] * drafted.prob(token_id) < target.prob(token_id):
                    path.append(at := i)
                    break
                target = residual(target, drafted)
            else:
                return Outcome(path, recovered(target, noise, position))
        return Outcome(path, bonus(rows.distribution(at + 1), noise, position))


@dataclass(frozen=True)
class BlockRejection(TokenRejection):
    """Judge the tokens of a draft together: surplus probability of a token helps an unlikely one behind it.

    Block verification (Sun et al. 2024, "Block verification accelerates speculative decoding", algorithm 2): lossless
    in distribution, and on average it accepts at least as many tokens as `TokenRejection` (theorems 1 and 2). A draft
    may end anywhere, as long as that is decided before its next token is drawn. A draft that was chosen without noise
    has no surplus, and both methods are the same for it.

    A tree is judged as by `TokenRejection`. Block verification is made for one path: whether a token is kept depends on
    those after it. The residual of a rejection is then not that of its own position, and no sibling can be judged
    against it.
    """

    def verify(self, draft: Draft, rows: Rows, noise: Noise, position: int) -> Outcome:
        """Judge a draft that begins at `position`; no row after an impossible token is read."""
        if not draft.probs or draft.parents is not None:
            return super().verify(draft, rows, noise, position)
        targets: list[Distribution] = []
        keep_probs = [1.0]  # keep_probs[n]: the probability that n or more tokens are accepted, given the first n
        for i, token_id in enumerate(draft.token_ids):
            targets.append(rows.distribution(i))
            ratio = targets[i].prob(token_id) / draft.probs[i].prob(token_id)
            if ratio == 0:
                break
            keep_probs.append(min(1.0, keep_probs[i] * ratio))
        uniforms = noise.uniforms(position, "accept", len(draft))
        if len(keep_probs) > len(draft) and uniforms[-1] < keep_probs[-1]:
            return Outcome.of_chain(len(draft), bonus(rows.distribution(len(draft)), noise, position))
        # The longest prefix that passes is accepted, so try the longest first. None passes after an impossible token,
        # and the empty one always passes.
        for n in range(min(len(keep_probs), len(draft)) - 1, -1, -1):
            left = surplus(targets[n], draft.probs[n], keep_probs[n])
            total = left.sum()
            if n == 0 or uniforms[n - 1] * (total + 1 - keep_probs[n]) < total:
                break
        return Outcome.of_chain(n, recovered(normalised(targets[n], left), noise, position))


def residual(target: Distribution, drafted: Distribution) -> Distribution:
    """norm(max(0, target_probs − draft_probs)), what a recovered token is drawn from (Leviathan et al. 2022, 2.3)."""
    return normalised(target, surplus(target, drafted))


def surplus(target: Distribution, drafted: Distribution, scale: float = 1.0) -> NDArray[np.float64]:
    """max(0, scale · target_probs − draft_probs) at target.token_ids, float64 [n]."""
    at = np.searchsorted(target.token_ids, drafted.token_ids)
    at[at == len(target.token_ids)] = 0
    shared = target.token_ids[at] == drafted.token_ids
    left = scale * target.probs
    left[at[shared]] -= drafted.probs[shared]
    return np.maximum(left, 0, out=left)


def normalised(target: Distribution, weights: NDArray[np.float64]) -> Distribution:
    """A distribution in proportion to weights at target.token_ids.

    All weights are 0 only if target and draft are equal. A rejection then has probability 0. If rounding causes one,
    the result is the target itself.
    """
    total = weights.sum()
    return Distribution(target.token_ids, weights / total) if total > 0 else target


def draft_probs(draft: Draft, i: int) -> Distribution:
    """The distribution of draft token i; certainty if it was chosen without the round's noise."""
    return draft.probs[i] if draft.probs else Distribution(np.array(draft.token_ids[i : i + 1]), np.ones(1))


def recovered(left: Distribution, noise: Noise, position: int) -> int:
    """The token in place of the first rejected one."""
    return left.draw(noise.uniforms(position, "recover", 1)[0])


def bonus(target: Distribution, noise: Noise, position: int) -> int:
    """The token after a draft that was accepted whole."""
    return target.draw(noise.uniforms(position, "bonus", 1)[0])
