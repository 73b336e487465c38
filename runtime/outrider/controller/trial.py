"""Tries a draft model on a few prompts, so that its acceptance is known before the first answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.controller.base import BasePolicy
from outrider.types import NO_DRAFT, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.controller.records import ModelRecord
    from outrider.types import Committed, Drafter, DraftRequest, Sequence

PROMPTS = (
    "Explain in a few sentences how a bicycle stays upright.",
    "Write a Python function that returns the n-th Fibonacci number.",
)
NUM_TOKENS = 24  # of each answer
NUM_DRAFT_TOKENS = 3  # a round


class Trial(BasePolicy):
    """Lets a draft model draft for one request, whether it pays or not, and updates its record.

    request.policy = Trial(model, records.of_model(request.verifier, "draft"))
    """

    def __init__(self, model: Drafter, record: ModelRecord) -> None:
        self.drafters, self._record = (model,), record
        self._turn: Turn | None = None

    def choose(self, requests: Seq[DraftRequest]) -> list[Turn]:
        """A turn of the draft model."""
        self._turn = Turn(requests[0], self.drafters[0])
        return [self._turn]

    def observe(self, sequence: Sequence, committed: Committed) -> None:  # noqa: ARG002
        """Record the outcome of the last draft."""
        turn, self._turn = self._turn, None
        self._record.observe(turn.draft if turn else NO_DRAFT, committed.path)
