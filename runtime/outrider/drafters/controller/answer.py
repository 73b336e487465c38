"""The controller's state of one answer, and of its current round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.drafters.controller.acceptance import Luck, Share
from outrider.drafters.controller.records import confidences_of, judged
from outrider.types import NO_DRAFT, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.drafters.controller.acceptance import Acceptance
    from outrider.drafters.controller.ledger import Account
    from outrider.drafters.controller.records import ModelRecord, Record
    from outrider.drafters.controller.rules import WorthIt
    from outrider.types import Draft, DraftRequest, TokenSequence


_OTHERS_TOKENS = 10.0  # of an answer's own, which all of other answers count for at most


@dataclass(slots=True)
class PricedTurn(Turn):
    """One answer's current round."""

    model: str | None = None  # that drafts
    rule: WorthIt | None = None  # ends its draft
    seconds: float = 0.0  # expected for drafting and the target pass
    granted: float = 0.0  # seconds of reading a prompt by a model that is known to pay; see `Account`


@dataclass(slots=True)
class ModelAnswer:
    """How one model's drafts were accepted in one answer."""

    record: ModelRecord
    share: Share  # the accepted share of its last twenty tokens or so
    luck: Luck = field(default_factory=lambda: Luck(weight=8.0, memory=0.95))  # with the last twenty or so

    @classmethod
    def of(cls, record: ModelRecord) -> ModelAnswer:
        """At the beginning of an answer, by what is known of others."""
        return cls(record, Share(record.share.mean, min(record.share.weight, _OTHERS_TOKENS), memory=0.95))

    def add(self, draft: Draft, path: Sequence[int]) -> None:
        """Take in the outcome of a draft. path: the indices of the accepted tokens."""
        for accepted, confidence in judged(draft, draft.num_first(path)):
            self.luck.add(self.record.by_confidence.chance(confidence), happened=accepted)
            self.share.add(accepted)
        self.record.observe(draft, path)

    def chance(self, confidence: float) -> float:
        """The probability of acceptance of a token of the model."""
        return self.luck.adjust(self.record.by_confidence.chance(confidence))


@dataclass(slots=True)
class AnswerRecord:
    """How drafts were accepted in one answer, and what they have cost and saved."""

    record: Record
    account: Account
    models: dict[str, ModelAnswer] = field(default_factory=dict)  # by name
    turn: PricedTurn | None = None
    luck: Luck = field(default_factory=lambda: Luck(weight=1.0, memory=0.9))  # with the last ten copied tokens or so
    copy: Draft = NO_DRAFT
    copied_at: int = 0
    goes_on: bool = False  # whether the last copy was right in all tokens that are committed since
    length: int = 0  # of the sequence after its last round
    request: DraftRequest | None = None  # its first

    def copy_chances(self, confidences: Sequence[float]) -> list[float]:
        """Each copied token's probability of acceptance if those before it are accepted. Some answers repeat more."""
        known = zip(self._copy_records(len(confidences)), confidences, strict=True)
        return [self.luck.adjust(record.chance(each)) for record, each in known]

    def observe_copy(self, sequence: TokenSequence) -> None:
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
