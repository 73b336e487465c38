"""What drafters have in common that copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from outrider.types import Committed, Draft, DraftRequest, Guess, Pending, Sequence


class Copier:
    """A `PricedDrafter` without a model: its drafts cost nothing, and none is begun ahead.

    A subclass has `reserve`, `propose` and `release`.
    """

    is_priced, is_free, goes_ahead = True, True, False
    seconds = ahead_seconds = 0.0  # there is no model to call

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Nothing to learn: the context holds committed tokens only."""

    def can_draft(self, request: DraftRequest) -> bool:  # noqa: ARG002
        """There is always room."""
        return True

    def seconds_for(self, num_tokens: Seq[int], context: float, before: int | None = None) -> float:  # noqa: ARG002
        """There is no call."""
        return 0.0

    def follow(self, expected: float, seconds: float) -> None:
        """There is no call whose cost could change."""

    def num_unread(self, sequence: Sequence) -> int:  # noqa: ARG002
        """What is committed is read when a draft is wanted."""
        return 0

    def num_ahead(self, sequence: Sequence) -> int:  # noqa: ARG002
        """Nothing is drafted ahead."""
        return 0

    def guess(
        self,
        request: DraftRequest,  # noqa: ARG002
        draft: Draft,  # noqa: ARG002
        chance: Callable[[float], float],  # noqa: ARG002
        next_chance: float,  # noqa: ARG002
    ) -> Guess | None:
        """Nothing is drafted ahead."""
        return None

    def draft_ahead(
        self,
        requests: Seq[DraftRequest],
        drafts: Seq[Draft],
        check: Pending,
        guesses: Seq[Guess | None] | None = None,
        max_calls: int | None = None,
    ) -> None:
        """Copying takes no time that could be saved."""
