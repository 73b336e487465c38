"""What losses and held-out accuracies have in common: the tokens that are compared, and accuracy by place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

# Tokens drawn at random beside the frequent ones, for heads that use the main model's whole output matrix: without them
# nothing would keep rare tokens' logits down.
NUM_RARE = 2048


class Candidates(NamedTuple):
    """The tokens over which a loss is taken. All of the vocabulary would cost most of a head's training time."""

    token_ids: Any  # int64 [candidates], each once

    @staticmethod
    def draw(frequent: Any, vocab_size: int, generator: Any) -> Candidates:
        """frequent: int64 [n], and NUM_RARE others of the vocabulary."""
        rare = torch.randint(vocab_size, (min(NUM_RARE, vocab_size),), generator=generator)
        return Candidates(torch.cat([frequent, rare]).unique())


def mean_over(losses: Any) -> Any:
    """The mean of losses [N]; zero if there is none, so that a batch without answers does no harm."""
    return losses.sum() / max(len(losses), 1)


class Accuracy:
    """Counts held-out hits by place: how often a draft token is right, given that all before it are."""

    def __init__(self) -> None:
        self._right: Any = 0
        self._count: Any = 0

    def add(self, right: Any, valid: Any) -> None:
        """right, valid: bool [N, places]."""
        alive = valid & torch.cat([torch.ones_like(right[:, :1]), right.cumprod(-1)[:, :-1].bool()], -1)
        self._right = self._right + (alive & right).sum(0)
        self._count = self._count + alive.sum(0)

    def by_place(self) -> list[float]:
        """Accuracy of place 1, 2, …; 0 where nothing was counted."""
        return [round(float(r) / max(int(c), 1), 4) for r, c in zip(self._right, self._count, strict=True)]

    def mean_length(self) -> float:
        """Tokens per round, the main model's own included, if as many are drafted as there are places."""
        total, alive = 1.0, 1.0
        for accuracy in self.by_place():
            alive *= accuracy
            total += alive
        return round(total, 3)
