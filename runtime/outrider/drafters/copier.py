"""The base of drafters that copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.drafters.without_calls import WithoutCalls

if TYPE_CHECKING:
    from outrider.types import Committed, DraftRequest, Sequence


class Copier(WithoutCalls):
    """A drafter without a model: its drafts cost nothing, and do not depend on the noise.

    A subclass implements `reserve`, `propose` and `release`.
    """

    is_free = True

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Do nothing: `propose` reads the committed tokens itself."""

    def can_draft(self, request: DraftRequest) -> bool:  # noqa: ARG002
        """Always True: it needs no slot."""
        return True

    def num_ahead(self, sequence: Sequence) -> int:  # noqa: ARG002
        """0: it never drafts ahead."""
        return 0
