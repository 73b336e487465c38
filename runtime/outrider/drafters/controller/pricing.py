"""What a turn is expected to cost and to gain: pure functions of seconds, tokens and probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from outrider.drafters.controller.ledger import TRIAL_SHARE, TRIAL_TOKENS
from outrider.models.cost.table import LONGEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.drafters.controller.acceptance import Share
    from outrider.drafters.controller.batch import Batch
    from outrider.types import Drafter


@dataclass(frozen=True, slots=True)
class ModelPrice:
    """What drafts of a model cost each of the `num_sharing` answers that it drafts for at the same time.

    call: seconds of its call. at_once: whether a draft takes one call; otherwise each token takes one. check: seconds
    that 0, 1, … draft tokens add to the target pass. most: tokens of its longest draft.
    """

    num_sharing: int
    call: float
    at_once: bool
    check: list[float]
    most: int

    @classmethod
    def of(cls, model: Drafter, batch: Batch, num_sharing: int) -> ModelPrice:
        """The price if the model drafts for `num_sharing` of the batch's answers."""
        return cls(
            num_sharing,
            model.seconds_for([1] * num_sharing, batch.context) / num_sharing,
            model.at_once,
            [seconds / num_sharing for seconds in batch.added_to_each(num_sharing)],
            min(model.most_tokens or LONGEST, LONGEST),
        )

    @property
    def step(self) -> float:
        """Seconds to draft a token after the first."""
        return 0.0 if self.at_once else self.call

    def drafting(self, count: int, num_ahead: int = 0) -> float:
        """Seconds to draft so many tokens, of which `num_ahead` were drafted ahead."""
        if not count or (num_ahead and self.at_once):
            return 0.0
        return self.step * (count - 1) + (0.0 if num_ahead else self.call)

    def pays(self, chance: float, limit: int, rate: float) -> bool:
        """Whether a draft is worth it. chance: of each token, to be accepted. rate: tokens per second."""
        costs = [
            rate * (seconds + self.drafting(k)) for k, seconds in enumerate(self.check[: min(limit, self.most) + 1])
        ]
        return best_length([chance] * (len(costs) - 1), costs)[1] > 0


def best_length(chances: Sequence[float], costs: Sequence[float]) -> tuple[float, int]:
    """The largest value of a draft, in tokens, and the length that has it.

    chances: each token's probability of acceptance if those before it are accepted. costs: in tokens, of 0, 1, …
    tokens.
    """
    best, length, kept, value = 0.0, 0, 1.0, 0.0
    for k, chance in enumerate(chances[: len(costs) - 1], 1):
        kept *= chance
        value += kept
        if value - costs[k] > best:
            best, length = value - costs[k], k
    return best, length


def is_known_to_pay(share: Share, costs: Sequence[float], known_tokens: float) -> bool:
    """Whether records show that drafts pay. share: of accepted tokens, in all answers. costs: as in `best_length`."""
    return share.weight >= known_tokens and best_length([share.mean] * (len(costs) - 1), costs)[0] > 0


def should_read(gain: float, price: float, left: Sequence[float]) -> bool:
    """Whether to read a prompt now: that saves time, and no less than to wait whether the answer ends soon.

    gain: seconds a token that drafts save. price: seconds of reading. left: tokens that the answer may still get, one
    of these numbers as likely as another.
    """
    longest_first = sorted(left, reverse=True)
    waits = [*longest_first[1:], 0]  # tokens; if so many are waited for, those before are still not ended
    saved = [
        gain * (total - n * wait) - n * price
        for n, (total, wait) in enumerate(zip(accumulate(longest_first), waits, strict=True), 1)
    ]
    return saved[-1] > 0 and saved[-1] >= max(saved)


def should_try(cost: float, idle: float, plain: float, *, leads: bool) -> bool:
    """Whether to try a drafter that does not seem to pay: for a share of the time, and once in TRIAL_TOKENS.

    cost: seconds of a try that fails. idle: seconds since the last one that has failed. plain: of a plain round. leads:
    whether drafts have saved time in this answer, so that it has twice as much for tries.
    """
    return cost <= (TRIAL_SHARE if leads else TRIAL_SHARE / 2) * idle or idle >= TRIAL_TOKENS * plain


def affordable(losses: Sequence[float], limit: float) -> int:
    """Most draft tokens whose loss is within the limit. losses: seconds of drafts of 1, 2, … tokens, if they fail."""
    return next((k for k in range(len(losses), 0, -1) if losses[k - 1] <= limit), 0)
