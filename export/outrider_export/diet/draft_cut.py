"""Whether a draft model's output matrix is cut if nobody says so, and to how many tokens.

    cut = AutomaticCut(vocabulary, candidates, required, costs)
    cut.choose(entry, folder, tokenizer, progress)    # int32 [n], or None: all

A smaller matrix saves time in each draft token, and loses those drafts that need another token. Both are known before:
see `DraftCosts` and `usual_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from outrider.errors import OutriderError, one_line
from outrider_export.describe.draft_costs import DraftCosts
from outrider_export.diet.expected_tokens import expected_tokens
from outrider_export.diet.usual_tokens import TokenUsage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from outrider.bundle.manifest import ModelEntry
    from outrider_export.progress import Progress
    from outrider_export.tokenizers.vocabulary import Vocabulary

SIZES = (24_576, 32_768, 49_152, 65_536)  # of an output matrix, in tokens
_LEAST_SAVED = 1.5  # a vocabulary is at least so many times as large
# Of drafting's speed: what a cut gains at least in the mean of all languages, and what it may lose in any of them.
_LEAST_GAIN, _MOST_LOST = 1.015, 0.95
_HOPED = 0.97  # of accepted tokens, that a cut keeps at best: what does not pay with them is not measured


@dataclass(frozen=True, eq=False)
class AutomaticCut:
    """A plan to cut an output matrix if that pays.

    candidates: int32 [n], the ids to choose from. required: ids that are always proposed.
    """

    vocabulary: Vocabulary
    candidates: NDArray[np.int32]
    required: NDArray[np.int32]
    costs: DraftCosts

    @property
    def sizes(self) -> list[int]:
        """Those that may be tried."""
        most = len(self.candidates) / _LEAST_SAVED
        return [size for size in SIZES if 2 * len(self.required) < size <= most]

    def choose(self, entry: ModelEntry, folder: Path, tokenizer: Path, progress: Progress) -> NDArray[np.int32] | None:
        """The proposed ids, int32 [n], ascending; None for all. See `expected_tokens`."""
        return self.choose_by(lambda: expected_tokens(entry, folder, self.vocabulary, tokenizer, progress), progress)

    def choose_by(self, find_usage: Callable[[], TokenUsage], progress: Progress) -> NDArray[np.int32] | None:
        """The same, with what is found of the tokens if a cut may pay."""
        whole = len(self.vocabulary)
        if not self.sizes:
            return None
        best = self.costs.speed(self.sizes[0], _HOPED) / self.costs.speed(whole)
        if best < _LEAST_GAIN:
            progress.note(
                f"draft vocabulary: all {whole:,} tokens. With {self.sizes[0]:,}, a draft token would take "
                f"{self._share(self.sizes[0])}: too little to pay for the drafts that are lost."
            )
            return None
        try:
            usage = find_usage()
        except OutriderError as error:
            progress.note(f"draft vocabulary: all {whole:,} tokens, as the model cannot be run: {one_line(error)}")
            return None
        kept = {size: usage.kept(partial(self._best, size)) for size in self.sizes}
        gains = {
            size: [self.costs.speed(size, part) / self.costs.speed(whole) for part in parts.values()]
            for size, parts in kept.items()
        }
        means = {size: float(np.exp(np.log(gain).mean())) for size, gain in gains.items()}
        allowed = [size for size in gains if means[size] >= _LEAST_GAIN and min(gains[size]) >= _MOST_LOST]
        size = max(allowed or gains, key=means.__getitem__)
        parts = kept[size]
        least = min(parts, key=parts.__getitem__)
        mean = sum(parts.values()) / len(parts)
        what = f"{mean:.0%} of the drafts that are accepted ({least}: {parts[least]:.0%})"
        if not allowed:
            progress.note(
                f"draft vocabulary: all {whole:,} tokens. {size:,} would keep {what}, and a draft token would take "
                f"{self._share(size)}."
            )
            return None
        progress.note(
            f"draft vocabulary: {size:,} of {whole:,} tokens keep {what}; a draft token takes {self._share(size)}. "
            "--draft-vocab all keeps all."
        )
        return self._best(size, usage.scores())

    def _best(self, size: int, scores: NDArray[np.float64]) -> NDArray[np.int32]:
        """int32 [size], ascending: the required ids, and those with the highest scores."""
        scores = scores.copy()
        scores[self.required] = np.inf
        best_first = np.lexsort((self.candidates, -scores[self.candidates]))
        return np.sort(self.candidates[best_first[:size]])

    def _share(self, size: int) -> str:
        share = self.costs.of_draft(size) / self.costs.of_draft(len(self.vocabulary))
        return f"{share:.2f} of its time, {'measured' if self.costs.measured else 'by the bytes that it reads'}"
