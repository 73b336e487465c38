"""Whether a draft model's output matrix is cut if nobody says so, and to which tokens.

    cut = AutomaticCut(vocabulary, candidates, required, 81_920, row_share)
    cut.choose(tokenizer, progress)    # int32 [n], or None: all

A smaller matrix saves time in each draft token, and loses those drafts that need another token. Nothing is measured:
the bytes of the matrix's rows tell the time, and the tokenizer which tokens are useful; see `usual_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.inputs.text import Tokenizer
from outrider_export.diet.usual_tokens import score_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from outrider_export.progress import Progress
    from outrider_export.tokenizers.vocabulary import Vocabulary

_LEAST_RATIO = 1.5  # a vocabulary is at least so many times as large
_LEAST_SAVED = 0.1  # of a draft token's time


@dataclass(frozen=True, eq=False)
class AutomaticCut:
    """A plan to cut an output matrix if that pays."""

    vocabulary: Vocabulary
    candidates: NDArray[np.int32]  # [n], the ids to choose from
    required: NDArray[np.int32]  # [n], ids that are always proposed
    num_tokens: int  # that are proposed, if it pays
    row_share: float  # of a draft token's time, that each row of the matrix takes, by the bytes that are read

    def choose(self, tokenizer: Path, progress: Progress) -> NDArray[np.int32] | None:
        """The proposed ids, int32 [num_tokens], ascending; None for all. tokenizer: the folder of the model's."""
        whole = len(self.vocabulary)
        saved = (whole - self.num_tokens) * self.row_share
        if 2 * len(self.required) >= self.num_tokens or len(self.candidates) < _LEAST_RATIO * self.num_tokens:
            return None
        if saved < _LEAST_SAVED:
            return None
        scores = score_tokens(self.vocabulary, Tokenizer(tokenizer).encode)
        progress.note(
            f"draft vocabulary: {self.num_tokens:,} of {whole:,} tokens; a draft token takes {1 - saved:.2f} of its "
            "time, by the bytes that it reads. --draft-vocab all keeps all."
        )
        scores[self.required] = np.inf
        best_first = np.lexsort((self.candidates, -scores[self.candidates]))
        return np.sort(self.candidates[best_first[: self.num_tokens]])
