"""A drafter that uses another drafter every round."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from outrider.types import NO_DRAFT, Draft, Drafter

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.types import Committed, DraftRequest, Sequence


class Shuffled(Drafter):
    """Chooses one of `drafters` or none, and the draft length, at random for every sequence and round.

    Text that does not change with this drafter does not change with any schedule. The choice is made before anything is
    drafted, so that rejection sampling stays exact.
    """

    num_assistant_tokens = 8

    def __init__(self, drafters: Seq[Drafter], seed: int = 0) -> None:
        self._drafters = drafters
        self._rng = np.random.default_rng(seed)

    @property
    def seconds(self) -> float:  # type: ignore[override]
        """Time spent in model calls so far."""
        return sum(drafter.seconds for drafter in self._drafters)

    def reserve(self, sequence: Sequence, max_tokens: int, num_cached: int = 0) -> bool:
        """Reserve room with all of them; False, without any room, while one has none."""
        if all(drafter.reserve(sequence, max_tokens, num_cached) for drafter in self._drafters):
            return True
        self.release(sequence)
        return False

    def propose(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """A draft for each request, of a random length up to its limit, from a random drafter."""
        drafts = [NO_DRAFT] * len(requests)
        chosen = self._rng.integers(len(self._drafters) + 1, size=len(requests))
        limits = self._rng.integers(1, [request.limit + 1 for request in requests])
        for number, drafter in enumerate(self._drafters):
            mine = np.flatnonzero(chosen == number).tolist()
            proposed = drafter.propose([replace(requests[i], limit=int(limits[i])) for i in mine])
            for i, draft in zip(mine, proposed, strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Pass on to all of them."""
        for drafter in self._drafters:
            drafter.observe(sequence, committed)

    def release(self, sequence: Sequence) -> None:
        """Release a sequence with all of them."""
        for drafter in self._drafters:
            drafter.release(sequence)
