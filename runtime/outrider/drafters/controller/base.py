"""What simple policies have in common: they learn nothing, keep nothing and draft nothing ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.types import Committed, Drafter, Pending, Sequence, Turn


class BasePolicy:
    """A policy without `choose`. The others of a policy's methods do nothing."""

    drafters: tuple[Drafter, ...] = ()
    goes_ahead = False

    def drafted(self) -> None:
        """Do nothing."""

    def go_ahead(self, turns: Seq[Turn], check: Pending) -> None:
        """Do nothing: nothing is drafted ahead."""

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Do nothing: there is nothing to learn."""

    def release(self, sequence: Sequence) -> None:
        """Do nothing: there is no state."""
