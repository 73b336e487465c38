"""Greedy verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.types import Draft, Noise, Outcome

if TYPE_CHECKING:
    from outrider.types import TargetRows


@dataclass(frozen=True)
class Greedy:
    """Keep draft tokens as long as they are what the main model would have taken.

    Lossless: compares processed logits, so the output is token for token that of plain greedy decoding.
    """

    def verify(self, draft: Draft, rows: TargetRows, noise: Noise, position: int) -> Outcome:  # noqa: ARG002
        """Judge a draft. `noise` and `position` are not used."""
        for i, token_id in enumerate(draft.token_ids):
            if (best := rows.best(i)) != token_id:
                return Outcome(i, best)
        return Outcome(len(draft), rows.best(len(draft)))
