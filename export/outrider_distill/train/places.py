"""What all losses and held-out accuracies have in common: the loss of a place, its weight, and accuracy by place.

A place is how far a draft token is from the text: place 1 is the first draft token of a round.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import torch

TEXT_WEIGHT = 0.3  # of the cross-entropy on the text's token; the rest is the main model's distribution
_ROWS = 128  # of logits in a piece of the loss
_LATEST_WEIGHT = 0.05  # weight of the latest batch in the running acceptance
_FIRST_ACCEPTANCE = 0.5  # acceptance before anything was seen


def columns_of(token_ids: Any, vocab_size: int) -> Any:
    """int64 [vocab_size]: each token's place among token_ids, int64 [n], each of which is there once; -1 for others."""
    columns = torch.full((vocab_size,), -1, device=token_ids.device)
    columns[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
    return columns


class Targets(NamedTuple):
    """What N draft tokens are to be, as training data has it."""

    token_ids: Any  # int64 [N]: the text's own
    top_ids: Any  # int64 [N, k]: the main model's likeliest tokens there; -1 beyond those kept
    top_probs: Any  # float32 [N, k]

    @staticmethod
    def at(batch: Any, row: Any, column: Any) -> Targets:
        """Those of the tokens at row, column: int64 [N] each. The main model predicts a token after the one before."""
        before = row, column - 1
        return Targets(batch.token_ids[row, column], batch.top_ids[before], batch.top_probs[before])


def draft_loss(logits: Any, targets: Targets, columns: Any) -> Any:
    """The loss of N draft tokens, float32 [N], by their logits [N, V] and the columns that tokens have in them.

    (1 - w) * KL(main model's stored top k || draft) + w * cross-entropy on the text's token, w = `TEXT_WEIGHT`. What
    the main model gives to tokens that are not stored, or not among the V, is left out.
    """
    return _DraftLoss.apply(logits, targets, columns)


class _DraftLoss(torch.autograd.Function):  # type: ignore[misc]  # torch is Any where it is not installed
    """`draft_loss` with its gradient, in pieces of rows that stay in the processor's cache.

    PyTorch's own operations would write and read [N, V] in float32 eight times, which takes longer than the products.
    """

    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Targets, columns: Any) -> Any:
        losses, gradient = torch.empty(len(logits), device=logits.device), torch.empty_like(logits)
        for start in range(0, len(logits), _ROWS):
            rows = slice(start, start + _ROWS)
            part = Targets(*(each[rows] for each in targets))
            log_probs = logits[rows].float().log_softmax(-1)
            at = columns[part.token_ids][:, None]
            text = TEXT_WEIGHT * (at >= 0)
            losses[rows] = (1 - TEXT_WEIGHT) * kl_of_top(log_probs, part, columns)
            losses[rows] -= (text * log_probs.gather(-1, at.clamp(min=0)))[:, 0]
            top_at, probs = _among(part, columns)
            top = (1 - TEXT_WEIGHT) * probs
            found = log_probs.exp_().mul_(text + top.sum(-1, keepdim=True))
            gradient[rows] = found.scatter_add_(-1, at.clamp(min=0), -text).scatter_add_(-1, top_at, -top)
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, wanted: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        # In place: nothing goes back through a loss twice.
        return gradient.mul_(wanted[:, None].to(gradient.dtype)), None, None


def kl_of_top(log_probs: Any, targets: Targets, columns: Any) -> Any:
    """Nats from the main model's stored top k to log_probs [N, V], float32 [N]; see `draft_loss`."""
    at, probs = _among(targets, columns)
    # The smallest half-precision number is 6e-8, so that no stored probability is cut off here.
    return (probs * (probs.clamp(min=1e-8).log() - log_probs.gather(-1, at))).sum(-1)


def _among(targets: Targets, columns: Any) -> tuple[Any, Any]:
    """The columns of the stored top k, int64 [N, k], and their probabilities; 0 for those that have no column."""
    at = columns[targets.top_ids.clamp(min=0)]
    return at.clamp(min=0), targets.top_probs * ((targets.top_ids >= 0) & (at >= 0))


def mean_over(losses: Any) -> Any:
    """The mean of losses [N]; zero if there is none, so that a batch without answers does no harm."""
    return losses.sum() / max(len(losses), 1)


class Reach:
    """The chance that a place is reached: the running acceptance of the places before it, multiplied.

    A draft token counts only where all before it were accepted, so the loss of a position is weighted by that
    probability (D-PACE; LK losses). What is counted is the training text itself. The weights are drawn: a batch has as
    many places as one draft would reach, so that no time is spent on places that hardly count yet.
    """

    def __init__(self, num_places: int) -> None:
        self.acceptance = torch.full((num_places,), _FIRST_ACCEPTANCE)  # float32, on the CPU

    def draw(self, chance: float) -> tuple[int, float]:
        """The places of a batch, and the weight of each: the expected weights of all places sum up to 1.

        chance: uniform in [0, 1).
        """
        reached = torch.cat([torch.ones(1), self.acceptance[:-1].cumprod(0)])
        return int((reached > chance).sum()), 1 / float(reached.sum())

    def follow(self, right: Any, valid: Any) -> None:
        """Count a batch. right, valid: bool [N, its places], as `Accuracy.add`."""
        alive = _alive(right, valid)
        count, hits = alive.sum(0).cpu(), (alive & right).sum(0).cpu()
        seen, unseen = self.acceptance.split([len(count), len(self.acceptance) - len(count)])
        seen = seen + _LATEST_WEIGHT * (count > 0) * (hits / count.clamp(min=1) - seen)
        self.acceptance = torch.cat([seen, unseen])


class Accuracy:
    """Counts held-out hits by place: how often a draft token is right, given that all before it are."""

    def __init__(self) -> None:
        self._right: Any = 0
        self._count: Any = 0

    def add(self, right: Any, valid: Any) -> None:
        """right, valid: bool [N, places]."""
        alive = _alive(right, valid)
        self._right = self._right + (alive & right).sum(0)
        self._count = self._count + alive.sum(0)

    def by_place(self) -> list[float]:
        """Accuracy of place 1, 2, …; 0 where nothing was counted."""
        return [round(float(r) / max(int(c), 1), 4) for r, c in zip(self._right, self._count, strict=True)]

    def mean_length(self) -> float:
        """Tokens per round, the main model's own included, if as many are drafted as there are places."""
        reached: list[float] = [*accumulate(self.by_place(), mul)]
        return round(1 + sum(reached), 3)


def _alive(right: Any, valid: Any) -> Any:
    """bool [N, places]: which tokens count, as all before them are right."""
    return valid & torch.cat([torch.ones_like(right[:, :1]), right.cumprod(-1)[:, :-1].bool()], -1)
