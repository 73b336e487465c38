"""A model's rows along a draft, for a verifier."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from outrider.types import Distribution, LogitsRow, Sampler, Step, TokenLogprobs


class DraftRows:
    """A model's rows along one draft, as `Rows`: row i follows i draft tokens, and is processed when it is needed.

        rows = DraftRows.of(step, first, sampler, draft.token_ids)
        rows.distribution(2)    # behind the draft's first two tokens

    row: returns row i; valid as long as its step. behind: tokens between the committed ones and the draft. found:
    distributions that were computed, by i.
    """

    def __init__(
        self,
        row: Callable[[int], LogitsRow],
        sampler: Sampler,
        draft_token_ids: Seq[int],
        behind: Seq[int] = (),
    ) -> None:
        self.draft_token_ids = draft_token_ids
        self.found: dict[int, Distribution] = {}
        self._row, self._sampler, self._behind = row, sampler, behind

    @classmethod
    def of(cls, step: Step, first: int, sampler: Sampler, draft_token_ids: Seq[int]) -> DraftRows:
        """The rows of a step from row `first` on."""
        return cls(lambda i: step.row(first + i), sampler, draft_token_ids)

    def best(self, i: int) -> int:
        """The token with the highest processed logit at row i."""
        return self._sampler.best(self._row(i), self._prefix(i))

    def distribution(self, i: int) -> Distribution:
        """target_probs at row i; draft_probs for a draft model's rows."""
        if i not in self.found:
            self.found[i] = self._sampler.distribution(self._row(i), self._prefix(i))
        return self.found[i]

    def logprobs(self, i: int, token_id: int) -> TokenLogprobs:
        """The log-probabilities for the token that was chosen at row i."""
        return self._sampler.logprobs(self._row(i), self._prefix(i), token_id)

    def _prefix(self, i: int) -> list[int]:
        return [*self._behind, *self.draft_token_ids[:i]]
