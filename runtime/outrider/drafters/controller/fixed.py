"""The policy that always chooses the same drafter."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.types import Drafter, DraftPolicy, DraftRequest, Pending, Turn


class Fixed(DraftPolicy):
    """Lets one drafter propose as many tokens as a request may have, whether that pays or not.

        request.policy = Fixed(Ngram())

    Policies of the same drafter are equal, so that it is called once for all requests that use it.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafters = (drafter,)
        self.goes_ahead = drafter.goes_ahead

    def __eq__(self, other: object) -> bool:
        return type(other) is Fixed and other.drafters[0] is self.drafters[0]

    def __hash__(self) -> int:
        return id(self.drafters[0])

    def choose(self, requests: Sequence[DraftRequest]) -> list[Turn]:
        """A turn of the drafter for each request."""
        return [Turn(request, self.drafters[0]) for request in requests]

    def go_ahead(self, turns: Sequence[Turn], check: Pending) -> None:
        """Let the drafter draft ahead until the target pass is done."""
        (drafter,) = self.drafters
        if drafter.goes_ahead:
            drafter.draft_ahead([turn.request for turn in turns], [turn.draft for turn in turns], check)
