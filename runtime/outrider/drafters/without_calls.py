"""The base of drafters that call no model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from outrider.types import Draft, DraftRequest, Guess, Pending, Sequence


class WithoutCalls:
    """A `PricedDrafter` whose drafts take no call of its own. It never drafts ahead during a target pass.

    A subclass implements `reserve`, `propose`, `observe`, `release`, `can_draft` and `num_ahead`.
    """

    is_priced, is_free, goes_ahead = True, False, False
    at_once = True
    most_tokens: int | None = None
    seconds = ahead_seconds = 0.0  # no model is called

    def seconds_for(self, num_tokens: Seq[int], context: float, before: int | None = None) -> float:  # noqa: ARG002
        """0: no model is called."""
        return 0.0

    def follow(self, expected: float, seconds: float) -> None:
        """Do nothing: no model is called."""

    def num_unread(self, sequence: Sequence) -> int:  # noqa: ARG002
        """0: there is nothing to read."""
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
        """Do nothing: drafting takes no time that could be saved."""
