"""A model's rows for a draft, for a verifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from outrider.errors import NoTokenLeft
from outrider.types import Distribution, Draft, LogitsRow, Sampler, TokenLogprobs

_Made = TypeVar("_Made")


class DraftRows:
    """A model's rows for one draft, as `Rows`: row 0, and row i + 1 after token i. Processed when they are needed.

        rows = DraftRows(step.rows(chunk).__getitem__, sampler, draft)
        rows.distribution(2)    # after the draft's second token, and what that one follows

    row: returns row i; valid as long as its step. between: tokens between the committed ones and the draft. found:
    distributions that were computed, by i.
    """

    def __init__(
        self, row: Callable[[int], LogitsRow], sampler: Sampler, draft: Draft, between: Sequence[int] = ()
    ) -> None:
        self.draft = draft
        self.found: dict[int, Distribution] = {}
        self._row, self._sampler, self._between = row, sampler, between

    def depth(self, i: int) -> int:
        """The number of draft tokens before row i: i in a chain."""
        return len(self.draft.before(i))

    def best(self, i: int) -> int:
        """The token with the highest processed logit at row i."""
        return self._ask(i, self._sampler.best)

    def best_several(self, i: int, count: int) -> list[int]:
        """Up to `count` tokens with the highest processed logits at row i, `best` first; as many as the row has."""
        return self._ask(i, lambda row, prefix: self._sampler.best_several(row, prefix, count))

    def distribution(self, i: int) -> Distribution:
        """target_probs at row i; draft_probs for a draft model's rows."""
        if i not in self.found:
            self.found[i] = self._ask(i, self._sampler.distribution)
        return self.found[i]

    def logprobs(self, i: int, token_id: int) -> TokenLogprobs:
        """The log-probabilities for the token that was chosen at row i."""
        return self._ask(i, lambda row, prefix: self._sampler.logprobs(row, prefix, token_id))

    def _ask(self, i: int, ask: Callable[[LogitsRow, list[int]], _Made]) -> _Made:
        """What the sampler makes of row i and the tokens before it."""
        try:
            return ask(self._row(i), [*self._between, *self.draft.before(i)])
        except NoTokenLeft as error:
            error.row = i  # the sampler knows how many tokens are before the row, in a tree no more than that
            raise
