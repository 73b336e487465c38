"""What drafting costs with a draft model, for choices at export."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.drafters.prediction import Costs, predict

_ACCEPTANCE = 0.6  # of draft tokens, by the main model
_LONGEST = 7  # draft, in tokens
_PER_ROW = 0.03  # of a call of one row, that each further row of the main model takes, where it was not measured


@dataclass(frozen=True)
class DraftCosts:
    """What calls cost, in any unit.

    check: a call of the main model, by rows. draft: of a draft token, by the tokens of the output matrix; what is not
    listed lies on a line. measured: on this machine; otherwise they are known from the bytes that are read. at_once:
    whether a call drafts all tokens.
    """

    check: dict[int, float]
    draft: dict[int, float]
    measured: bool = False
    at_once: bool = False

    @classmethod
    def of_bytes(cls, main: float, draft: float, width: int, row_bytes: float, *, at_once: bool = False) -> DraftCosts:
        """From the bytes of the weights. width, row_bytes: the rows of the draft model's output matrix, and of each."""
        check = {1: main, 1 + _LONGEST: main * (1 + _LONGEST * _PER_ROW)}
        return cls(check, {1: max(draft - width * row_bytes, 0.0), width: draft}, at_once=at_once)

    def of_draft(self, num_tokens: int) -> float:
        """Of a draft token, with an output matrix for so many tokens."""
        sizes = sorted(self.draft)
        small, large = sizes[0], sizes[-1]
        if num_tokens in self.draft or small == large:
            return self.draft.get(num_tokens, self.draft[large])
        per_row = (self.draft[large] - self.draft[small]) / (large - small)
        return self.draft[large] - (large - num_tokens) * per_row

    def speed(self, num_tokens: int, kept: float = 1.0) -> float:
        """Of decoding, as a multiple of plain decoding's. kept: of the accepted tokens, those that are proposed."""
        check = np.interp(range(1, _LONGEST + 2), [*self.check], [*self.check.values()]).tolist()
        one = self.of_draft(num_tokens)
        draft = [one if self.at_once else one * count for count in range(1, _LONGEST + 1)]
        return predict([_ACCEPTANCE * kept] * _LONGEST, Costs(check, draft)).speed_up
