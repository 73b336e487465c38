"""The controller's state of one answer, and of its current round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.drafters.controller.acceptance import Luck, Share
from outrider.drafters.controller.records import confidences_of, judged
from outrider.types import NO_DRAFT, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.drafters.controller.acceptance import Acceptance
    from outrider.drafters.controller.records import ModelRecord, Record
    from outrider.drafters.controller.rules import WorthIt
    from outrider.types import Draft, Sequence

BUDGET = 0.01  # share of an answer's time for drafts that may not pay
_MEMORY = 0.9  # weight of earlier rounds after another one: the rate is that of about ten rounds
_FIRST_PROBE, _LAST_PROBE = 8, 32  # rounds between tries of a draft model that does not pay


@dataclass(slots=True)
class PricedTurn(Turn):
    """One answer's current round.

    model: the name of the model that drafts; None for none. rule: ends its draft. seconds: expected for drafting and
    the target pass. plain: seconds of a plain round.
    """

    model: str | None = None
    rule: WorthIt | None = None
    seconds: float = 0.0
    plain: float = 0.0


@dataclass(slots=True)
class ModelAnswer:
    """What one model's drafts have gained in one answer.

    share: the accepted share of its tokens. reading: whether it reads the prompt. regret: seconds that were lost by not
    reading it. worked: whether a token of its last draft was accepted.
    """

    record: ModelRecord
    share: Share
    reading: bool = False
    luck: Luck = field(default_factory=lambda: Luck(weight=8.0, memory=0.95))
    regret: float = 0.0
    patience: int = _FIRST_PROBE
    waited: int = 0
    worked: bool = False

    @classmethod
    def of(cls, record: ModelRecord) -> ModelAnswer:
        """At the beginning of an answer, by what is known of others."""
        return cls(record, Share(record.share.mean, weight=min(record.share.weight, 6.0), memory=0.9))

    def probes(self, value: float, cost: float, budget: float) -> bool:
        """Whether to try a model that does not seem to pay here.

        cost: seconds of a try; 0 for a model that has paid in other answers. budget: seconds that may be lost.
        """
        if not self.reading or value > 0:
            self.waited, self.patience = 0, _FIRST_PROBE
            return False
        self.waited += 1
        if self.waited < self.patience or (cost and cost > budget and not self.worked):
            return False
        self.waited, self.patience = 0, min(2 * self.patience, _LAST_PROBE)
        return True

    def add(self, draft: Draft, path: Seq[int]) -> None:
        """Take in the outcome of a draft. path: the indices of the accepted tokens."""
        for accepted, confidence in judged(draft, draft.num_first(path)):
            self.luck.add(self.record.by_confidence.chance(confidence), happened=accepted)
            self.share.add(accepted)
        self.record.observe(draft, path)
        self.worked = bool(path)
        if path:
            self.waited = self.patience = _FIRST_PROBE  # try again at once

    @property
    def careful_share(self) -> float:
        """The accepted share of the model's tokens here, estimated carefully."""
        known = self.record.share
        return max(self.share.mean - (known.mean - known.careful), 0.0)

    def chance(self, confidence: float) -> float:
        """The probability of acceptance of a token of the model."""
        return self.luck.adjust(self.record.by_confidence.chance(confidence))


@dataclass(slots=True)
class Answer:
    """What drafts have gained and cost in one answer.

    tokens, seconds: of recent rounds. models: by name. spent: seconds so far. lead: seconds saved against plain
    decoding.
    """

    record: Record
    tokens: float
    seconds: float
    models: dict[str, ModelAnswer] = field(default_factory=dict)
    turn: PricedTurn | None = None
    luck: Luck = field(default_factory=lambda: Luck(weight=1.0, memory=0.9))  # with copies
    copy: Draft = NO_DRAFT
    copied_at: int = 0
    goes_on: bool = False  # whether the last copy was right in all tokens that are committed since
    spent: float = 0.0
    lead: float = 0.0

    @property
    def budget(self) -> float:
        """Seconds for drafts that may not pay: a share of the time so far, and the lead."""
        return BUDGET * self.spent + self.lead

    def add(self, turn: PricedTurn, path: Seq[int]) -> None:
        """Take in the outcome of a round. path: the indices of the accepted tokens."""
        num_accepted = len(path)
        self.tokens = _MEMORY * self.tokens + num_accepted + 1
        self.seconds = _MEMORY * self.seconds + turn.seconds
        self.spent += turn.seconds
        self.lead += (num_accepted + 1) * turn.plain - turn.seconds
        if turn.model is not None:
            self.models[turn.model].add(turn.draft, path)

    def copy_chances(self, confidences: Seq[float], *, careful: bool = False) -> list[float]:
        """Each copied token's probability of acceptance if those before it are accepted. Some answers repeat more.

        careful: a lower estimate if little is known.
        """
        known = zip(self._copy_records(len(confidences)), confidences, strict=True)
        chances = [record.careful(each) if careful else record.chance(each) for record, each in known]
        most = 1.0 if careful else math.inf  # a few accepted tokens prove nothing
        return [self.luck.adjust(chance, most) for chance in chances]

    def observe_copy(self, sequence: Sequence) -> None:
        """Learn from the last copy, proposed or not, by comparing it with the committed tokens."""
        committed = sequence.token_ids[self.copied_at :]
        records = self._copy_records(len(self.copy))
        for i, (token_id, said) in enumerate(zip(self.copy.token_ids, committed, strict=False)):
            confidence = confidences_of(self.copy)[i]
            self.luck.add(records[i].chance(confidence), happened=token_id == said)
            records[i].observe(confidence, accepted=token_id == said)
            if token_id != said:
                break
        copied = self.copy.token_ids[: len(committed)]
        self.goes_on = bool(copied) and copied == committed[: len(copied)] and len(committed) <= len(copied) + 1
        self.copy = NO_DRAFT

    def _copy_records(self, count: int) -> list[Acceptance]:
        """What is known of each token of a copy: that the first is right, where none was before, is less likely."""
        return [self.record.copies if i or self.goes_on else self.record.first_copies for i in range(count)]
