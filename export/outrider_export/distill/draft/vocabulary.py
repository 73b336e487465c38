"""The tokens that a small draft model proposes: those that the main model says.

    token_ids = choose_vocabulary(source, counts, 32_768, progress)      # int64 [n], ascending

As export's `--draft-vocab` with a corpus, only that the corpus is the main model's answers, token by token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outrider.errors import VocabularyMismatch
from outrider_export.diet import choose_by_counts
from outrider_export.special_tokens import eos_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from outrider_export.plan import Plan
    from outrider_export.progress import Progress
    from outrider_export.vocabulary import Vocabulary


def choose_vocabulary(
    source: Plan, counts: NDArray[np.int64], num_tokens: int | None, progress: Progress
) -> NDArray[np.int64] | None:
    """The ids to propose, int64 [num_tokens], ascending: special tokens, and the most useful; None for all.

    counts: int64 [n], how often the main model says each token. num_tokens: 0 for all, None for export's default with a
    corpus.

    Raises:
        OptionError: for fewer tokens than are always proposed.
    """
    chosen = choose_by_counts(source.vocabulary, eos_of(source), num_tokens, counts, progress)
    return None if chosen is None else chosen.astype(np.int64)


def check_vocabulary(main: Vocabulary, main_id: str, draft: Vocabulary, draft_id: str) -> None:
    """Check that two models have the same tokens: distributions of one are to be learned by the other.

    Raises:
        VocabularyMismatch: with the first token that differs.
    """
    if main.tokens == draft.tokens:
        return
    pairs = enumerate(zip(main.tokens, draft.tokens, strict=False))
    differs = next((f"token {i} is {a!r} and {b!r}" for i, (a, b) in pairs if a != b), None)
    differs = differs or f"they have {len(main):,} and {len(draft):,} tokens"
    raise VocabularyMismatch(
        f"{draft_id} cannot learn from {main_id}: their vocabularies differ ({differs}). Choose a smaller model of the "
        f"same family with --from, or pair them as they are: outrider export {main_id} --draft {draft_id}"
    )
