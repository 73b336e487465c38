"""One sequence as a draft model reads and continues it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.errors import NoTokenLeft
from outrider.types import Distribution, Draft

if TYPE_CHECKING:
    from outrider.types import DraftRequest, Logits, Sampler, Sequence, Slot


class Reader:
    """Reads and drafts in the main model's own tokens. Lives from `reserve` to `release`, with a new draft each round.

    slot: the sequence's place in the draft model's cache, with room for `room` draft tokens.
    """

    request: DraftRequest  # this round's

    def __init__(self, slot: Slot, room: int) -> None:
        self.slot = slot
        self.room = room
        self.unread: list[int] = []  # draft token ids that the model has to read before its next row
        self._token_ids: list[int] = []
        self._probs: list[Distribution] = []
        self._confidences: list[float] = []

    def context(self, sequence: Sequence) -> list[int]:
        """The committed tokens, in the draft model's ids."""
        return sequence.token_ids

    def begin(self, request: DraftRequest) -> bool:
        """Start a round's draft; False where it stays empty: no room for one, or nothing to go on from."""
        self.request, self._token_ids, self._probs, self._confidences = request, [], [], []
        context = self.context(request.sequence)
        self.slot.trim(max(len(context) - 1, 0))  # the last one is read for its row
        self.unread = context[self.slot.length :]
        # A token is needed more than is drafted: the last one is not read.
        return bool(context) and len(context) + request.limit - 1 <= self.room

    def choose(self, logits: Logits) -> None:
        """Take the next token from its row, float32 [vocab_size]."""
        request, i = self.request, len(self._token_ids)
        row = _Row(logits, request.sampler, self._token_ids)
        try:
            token_id, probs = request.verifier.draw(row, i, request.noise, len(request.sequence))
        except NoTokenLeft:  # the draft ends here; the main model's own row is what may fail the request
            self.unread = []
            return
        if probs:
            self._probs.append(probs)
        self._token_ids.append(token_id)
        if request.rule:  # nobody else asks
            self._confidences.append(row.confidence(token_id))
        self.unread = [token_id]

    @property
    def wants_more(self) -> bool:
        """Whether another token may follow; not where the prompt is not read yet, nor behind an end."""
        request, token_ids = self.request, self._token_ids
        unfinished = 0 < len(token_ids) < request.limit and bool(self.unread)
        return unfinished and token_ids[-1] not in request.eos_token_ids and self._may_go_on

    @property
    def _may_go_on(self) -> bool:
        rule = self.request.rule
        return rule is None or rule.wants_more(self._confidences)

    @property
    def draft(self) -> Draft:
        """What has been chosen, in the main model's ids."""
        return Draft(self._token_ids, self._probs or None, self._confidences or None)

    def observe(self, sequence: Sequence, num_accepted: int) -> None:
        """Keep the cache up to the last accepted token."""
        self.slot.trim(len(self.context(sequence)) + num_accepted)


@dataclass(slots=True)
class _Row:
    """The draft model's latest row, as `Rows`: it follows all draft tokens so far."""

    logits: Logits
    sampler: Sampler
    draft_token_ids: list[int]
    _distribution: Distribution | None = None

    def best(self, i: int) -> int:
        return self.sampler.best(self.logits, self.draft_token_ids[:i])

    def distribution(self, i: int) -> Distribution:
        if self._distribution is None:
            self._distribution = self.sampler.distribution(self.logits, self.draft_token_ids[:i])
        return self._distribution

    def confidence(self, token_id: int) -> float:
        """The probability of a token that was taken: of draft_probs if they were asked for, else the model's own."""
        return self._distribution.prob(token_id) if self._distribution else confidence(self.logits, token_id)


def confidence(logits: Logits, token_id: int) -> float:
    """The softmax of a row, float32 [vocab_size], at one token."""
    total = np.exp(logits - logits.max()).sum()
    return float(np.exp(logits[token_id] - logits.max()) / total)
