"""Drafts from a smaller model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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

    def __init__(self, backend: Backend, max_num_batched_tokens: int = 512) -> None:
        self.backend = backend
        self._max_num_batched_tokens = max_num_batched_tokens
        self._states: dict[Sequence, _State] = {}

    @property
    def seconds(self) -> float:
        """Time spent in the draft model's calls so far."""
        return self.backend.seconds

    def reserve(self, sequence: Sequence, max_tokens: int) -> bool:
        """Take room in the cache for a sequence that may grow to `max_tokens`; False while there is none."""
        if (slot := self.backend.open(max_tokens)) is None:
            return False
        self._states[sequence] = _State(slot)
        return True

    def propose(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """A draft of `limit` tokens for each request; the prompt is read first where that has not happened."""
        drafts = [_Drafting(request, self._state(request)) for request in requests if request.limit > 0]
        for drafting in drafts:
            self._read_ahead(drafting)
        active = drafts
        while active:
            chunks = [Chunk(drafting.state.slot, drafting.unread, num_rows=1) for drafting in active]
            step = self.backend.submit(chunks).wait()
            for i, drafting in enumerate(active):
                drafting.choose(step.logits(i))
            active = [drafting for drafting in active if len(drafting.token_ids) < drafting.request.limit]
        by_sequence = {drafting.request.sequence: drafting.draft for drafting in drafts}
        return [by_sequence.get(request.sequence, Draft([])) for request in requests]

    def observe(self, sequence: Sequence, num_accepted: int) -> None:
        """Keep the cache up to the last accepted token."""
        if state := self._states.get(sequence):
            state.num_valid = len(sequence) + num_accepted

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence and give its cache back."""
        if state := self._states.pop(sequence, None):
            state.slot.close()

    def _state(self, request: DraftRequest) -> _State:
        state = self._states[request.sequence]
        # Tokens that were drafted and not observed (an interrupted round) count as rejected.
        state.slot.trim(min(state.num_valid, len(request.sequence) - 1))
        state.num_valid = len(request.sequence)
        return state

    def _read_ahead(self, drafting: _Drafting) -> None:
        """Read all but the last piece of what is new, without asking for logits."""
        while len(drafting.unread) > self._max_num_batched_tokens:
            piece = drafting.unread[: self._max_num_batched_tokens]
            self.backend.submit([Chunk(drafting.state.slot, piece, num_rows=0)]).wait()
            del drafting.unread[: len(piece)]


@dataclass(slots=True)
class _State:
    """What is known of a sequence between rounds."""

    slot: Slot
    num_valid: int = 0  # tokens in the slot that are the sequence's own


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
    state: _State
    unread: list[int] = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unread = self.request.sequence.token_ids[self.state.slot.length :]

    def choose(self, logits: Logits) -> None:
        """Take the next token from its row."""
        request, i = self.request, len(self.token_ids)
        row = _Row(logits, request.sampler, self.token_ids)
        token_id, probs = request.verifier.draw(row, i, request.noise, len(request.sequence))
        if probs:
            self.probs.append(probs)
        self.token_ids.append(token_id)
        self.unread = [token_id]

    @property
    def draft(self) -> Draft:
        """What has been chosen."""
        return Draft(self.token_ids, self.probs or None)
