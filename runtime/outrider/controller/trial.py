"""Trying a draft model on a few prompts, so that no answer begins by guessing what its drafts are worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.types import NO_DRAFT

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.controller.records import Record
    from outrider.drafters import DraftModel
    from outrider.types import Committed, Draft, DraftRequest, Sequence

PROMPTS = (
    "Explain in a few sentences how a bicycle stays upright.",
    "Write a Python function that returns the n-th Fibonacci number.",
)
NUM_TOKENS = 24  # of each answer
NUM_DRAFT_TOKENS = 3  # a round


class Trial:
    """A draft model that drafts whether it pays or not, and whose record is kept.

    request.drafter = Trial(model, records.of(request.verifier))
    """

    num_assistant_tokens = NUM_DRAFT_TOKENS

    def __init__(self, model: DraftModel, record: Record) -> None:
        self._model, self._record = model, record
        self._draft: Draft = NO_DRAFT

    @property
    def seconds(self) -> float:
        """Time spent in the model's calls so far."""
        return self._model.seconds

    def reserve(self, sequence: Sequence, max_tokens: int, num_cached: int) -> bool:
        """Take room with the model."""
        return self._model.reserve(sequence, max_tokens, num_cached)

    def propose(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """What the model proposes."""
        drafts = self._model.propose(requests)
        self._draft = drafts[0] if drafts else NO_DRAFT
        return drafts

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Learn from what became of the last draft."""
        self._model.observe(sequence, committed)
        self._record.judge(self._draft, len(committed.path))

    def release(self, sequence: Sequence) -> None:
        """Give the model's room back."""
        self._model.release(sequence)
