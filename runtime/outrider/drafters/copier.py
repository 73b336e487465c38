"""The base of drafters that copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from outrider.types import Committed, Draft, DraftRequest, Guess, Pending, Sequence


class Copier:
    """A `PricedDrafter` without a model: its drafts cost nothing, and it never drafts ahead.

    A subclass implements `reserve`, `propose` and `release`.
    """

    is_priced, is_free, goes_ahead = True, True, False
    at_once = True
    most_tokens: int | None = None
    seconds = ahead_seconds = 0.0  # no model is called

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Do nothing: `propose` reads the committed tokens itself."""

    def can_draft(self, request: DraftRequest) -> bool:  # noqa: ARG002
        """Always True: it needs no slot."""
        return True

    def seconds_for(self, num_tokens: Seq[int], context: float, before: int | None = None) -> float:  # noqa: ARG002
        """0: no model is called."""
        return 0.0

    def follow(self, expected: float, seconds: float) -> None:
        """Do nothing: no model is called."""

    def num_unread(self, sequence: Sequence) -> int:  # noqa: ARG002
        """0: `propose` reads the committed tokens itself."""
        return 0

    def num_ahead(self, sequence: Sequence) -> int:  # noqa: ARG002
        """0: it never drafts ahead."""
        return 0

    def guess(
        self,
        request: DraftRequest,  # noqa: ARG002
        draft: Draft,  # noqa: ARG002
        chance: Callable[[float], float],  # noqa: ARG002
        next_chance: float,  # noqa: ARG002
    ) -> Guess | None:
        """None: it never drafts ahead."""
        return None

    def draft_ahead(
        self,
        requests: Seq[DraftRequest],
        drafts: Seq[Draft],
        check: Pending,
        guesses: Seq[Guess | None] | None = None,
        max_calls: int | None = None,
    ) -> None:
        """Do nothing: copying takes no time that could be saved."""
