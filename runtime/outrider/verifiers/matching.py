"""Verification by equality: a draft token is accepted if it is the main model's token at its position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from outrider.types import Draft, Noise, Outcome

if TYPE_CHECKING:
    from outrider.types import Rows


@dataclass(frozen=True)
class Greedy:
    """Take the token with the highest processed logit.

    Lossless: compares logits, not probabilities, so the output is token for token that of plain greedy decoding.
    """

    lossless: ClassVar[bool] = True

    def draw(self, rows: Rows, i: int, noise: Noise, position: int) -> tuple[int, None]:  # noqa: ARG002
        """The token that this mode takes at row i. `noise` and `position` are not used."""
        return rows.best(i), None

    def verify(self, draft: Draft, rows: Rows, noise: Noise, position: int) -> Outcome:
        """Accept draft tokens as long as they equal what `draw` gives."""
        draft.check_chain(self)
        for i, token_id in enumerate(draft.token_ids):
            if (own := self.draw(rows, i, noise, position)[0]) != token_id:
                return Outcome.of_chain(i, own)
        return Outcome.of_chain(len(draft), self.draw(rows, len(draft), noise, position)[0])


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
        """The token at row i, which is at `position + i` of the sequence."""
        drawn = rows.distribution(i)
        scores = np.log(drawn.probs) + noise.gumbel(position + i, drawn.token_ids)
        return int(drawn.token_ids[scores.argmax()]), None
