"""Verification by equality: a draft token is accepted if it is the main model's token at its position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from outrider.tokens.sampling import ranked
from outrider.types import Distribution, Draft, Noise, Outcome, Rows


@dataclass(frozen=True)
class Greedy:
    """Take the token with the highest processed logit.

    Lossless: compares logits, not probabilities, so the output is token for token that of plain greedy decoding.
    """

    lossless: ClassVar[bool] = True
    trees: ClassVar[bool] = True

    def draw(self, rows: Rows, i: int, noise: Noise, position: int) -> tuple[int, None]:  # noqa: ARG002
        """The token that this mode takes at row i. `noise` and `position` are not used."""
        return rows.best(i), None

    def draw_several(
        self,
        rows: Rows,
        i: int,
        noise: Noise,  # noqa: ARG002
        position: int,  # noqa: ARG002
        count: int,
    ) -> list[tuple[int, None]]:
        """The best token, the next best, and so on."""
        return [(token_id, None) for token_id in rows.best_several(i, count)]

    def verify(self, draft: Draft, rows: Rows, noise: Noise, position: int) -> Outcome:
        """Accept draft tokens as long as one of the candidates equals what `draw` gives.

        No candidate changes what `draw` gives, so a tree is as lossless as a chain. Of equal siblings, which a drafter
        has no reason to propose, the first one is followed.
        """
        path, at = list[int](), -1
        while True:
            own = self.draw(rows, at + 1, noise, position)[0]
            for i in draft.children(at):
                if draft.token_ids[i] == own:
                    path.append(at := i)
                    break
            else:
                return Outcome(path, own)


@dataclass(frozen=True)
class Coupled(Greedy):
    """Take argmax(log target_probs + Gumbel noise), with noise that draft and main model share.

    Lossless, and the text does not depend on the draft: the noise is a function of seed, position and token id, so the
    main model's token at a position is the same whatever was proposed for it. The drafter adds the same noise to its
    own draft_probs, which makes the two agree with probability at least (1 − d) / (1 + d) at total-variation distance d
    (Daliri et al. 2024, "Coupling without communication and drafter-invariant speculative decoding", theorem 2), where
    rejection sampling accepts with 1 − d.
    """

    def draw(self, rows: Rows, i: int, noise: Noise, position: int) -> tuple[int, None]:
        """The token at row i, which has the position after the draft tokens before it."""
        drawn, scores = self._scores(rows, i, noise, position)
        return int(drawn.token_ids[scores.argmax()]), None

    def draw_several(self, rows: Rows, i: int, noise: Noise, position: int, count: int) -> list[tuple[int, None]]:
        """The tokens with the highest sums of log draft_probs and noise.

        That is drawing without replacement: the Gumbel-Top-k trick (Vieira 2014; Kool et al. 2019, "Stochastic beams
        and where to find them").
        """
        drawn, scores = self._scores(rows, i, noise, position)
        return [(token_id, None) for token_id in drawn.token_ids[ranked(scores, count)].tolist()]

    def _scores(self, rows: Rows, i: int, noise: Noise, position: int) -> tuple[Distribution, NDArray[np.float64]]:
        """The distribution at row i, and for each of its tokens the log-probability plus the noise, float64 [n]."""
        drawn = rows.distribution(i)
        return drawn, np.log(drawn.probs) + noise.gumbel(position + rows.depth(i), drawn.token_ids)
