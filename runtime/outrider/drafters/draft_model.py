"""Drafts from a smaller model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.errors import NoTokenLeft
from outrider.types import Chunk, Distribution, Draft

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.types import Backend, DraftRequest, Logits, Sampler, Sequence, Slot


class DraftModel:
    """A smaller model with the main model's vocabulary, decoding ahead.

    Tokens are chosen as the request's verifier wants them, through the same processors as the main model's, so that
    draft_probs come as close to target_probs as they can (Leviathan et al. 2022, section 2). Several sequences are
    drafted in one call, token by token.
    """

    num_assistant_tokens = 3

    def __init__(self, backend: Backend, *, context_length: int, max_num_batched_tokens: int = 512) -> None:
        self.backend = backend
        self._context_length = context_length
        self._max_num_batched_tokens = max_num_batched_tokens
        self._slots: dict[Sequence, Slot] = {}

    @property
    def seconds(self) -> float:
        """Time spent in the draft model's calls so far."""
        return self.backend.seconds

    def reserve(self, sequence: Sequence, max_tokens: int) -> bool:
        """Take room in the cache for a sequence that may grow to `max_tokens`; False while there is none."""
        if (slot := self.backend.open(max_tokens)) is None:
            return False
        self._slots[sequence] = slot
        return True

    def propose(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """A draft of `limit` tokens for each request, of fewer where the draft model's own context ends.

        A long prompt is read piece by piece, one a round; until it is read, its drafts are empty.
        """
        drafting = [_Drafting(request, self._slots[request.sequence]) for request in requests]
        piece = max(self._max_num_batched_tokens // max(len(requests), 1), 2)
        # A token is needed more than is drafted: the last one is not read.
        active = [d for d in drafting if len(d.request.sequence) + d.request.limit - 1 <= self._context_length]
        while active:
            chunks = [Chunk(d.slot, d.unread[:piece], num_rows=int(len(d.unread) <= piece)) for d in active]
            step = self.backend.submit(chunks).wait()
            rows = iter(range(len(active)))
            for d, chunk in zip(active, chunks, strict=True):
                if chunk.num_rows:
                    d.choose(step.logits(next(rows)))
            active = [d for d in active if d.wants_more]
        return [d.draft for d in drafting]

    def observe(self, sequence: Sequence, num_accepted: int) -> None:
        """Keep the cache up to the last accepted token."""
        if slot := self._slots.get(sequence):
            slot.trim(len(sequence) + num_accepted)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence and give its cache back."""
        if slot := self._slots.pop(sequence, None):
            slot.close()


@dataclass(frozen=True, slots=True)
class _Row:
    """The draft model's latest row, as `Rows`: it follows all draft tokens so far."""

    logits: Logits
    sampler: Sampler
    draft_token_ids: list[int]

    def best(self, i: int) -> int:
        return self.sampler.best(self.logits, self.draft_token_ids[:i])

    def distribution(self, i: int) -> Distribution:
        return self.sampler.distribution(self.logits, self.draft_token_ids[:i])


@dataclass(slots=True)
class _Drafting:
    """One sequence's draft in the making."""

    request: DraftRequest
    slot: Slot
    unread: list[int] = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unread = self.request.sequence.token_ids[self.slot.length :]

    def choose(self, logits: Logits) -> None:
        """Take the next token from its row."""
        request, i = self.request, len(self.token_ids)
        row = _Row(logits, request.sampler, self.token_ids)
        try:
            token_id, probs = request.verifier.draw(row, i, request.noise, len(request.sequence))
        except NoTokenLeft:  # the draft ends here; the main model's own row is what may fail the request
            self.unread = []
            return
        if probs:
            self.probs.append(probs)
        self.token_ids.append(token_id)
        self.unread = [token_id]

    @property
    def wants_more(self) -> bool:
        """Whether another token may follow; not where the prompt is not read yet, nor behind an end."""
        request, token_ids = self.request, self.token_ids
        unfinished = 0 < len(token_ids) < request.limit and bool(self.unread)
        return unfinished and token_ids[-1] not in request.eos_token_ids

    @property
    def draft(self) -> Draft:
        """What has been chosen."""
        return Draft(self.token_ids, self.probs or None)
