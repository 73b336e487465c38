"""A draft model's state for one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.choices import Choices
from outrider.models.cost.table import SHORT
from outrider.types import (
    Chunk,
    Committed,
    Draft,
    DraftRequest,
    Guess,
    LogitsRow,
    Slot,
    TokenSequence,
    num_common_tokens,
)


class DraftState(Choices):
    """One sequence in a draft model: its slot, the tokens left to read, and this round's draft.

    Lives from `reserve` to `release`. This class is for a draft model with the main model's vocabulary. During a target
    pass it may draft ahead, from a guessed outcome. If the guess is right, the next draft is begun already.

    slot: in the draft model's cache, with room for `room` draft tokens.
    """

    can_draft_ahead = True

    def __init__(self, slot: Slot, room: int) -> None:
        super().__init__()
        self.slot = slot
        self.room = room
        self._num_context: int | None = None  # draft token ids before this round's draft
        self._num_committed = 0  # length of the sequence when the following was drafted ahead

    def context(self, sequence: TokenSequence) -> list[int]:
        """The committed tokens, in the draft model's ids."""
        return sequence.token_ids

    @property
    def num_unread(self) -> int:
        """Tokens to read before the next row."""
        return len(self.unread)

    def has_room(self, request: DraftRequest) -> bool:
        """Whether the context and a draft fit in the slot. The draft's last token is never read."""
        context = self.context(request.sequence)
        return bool(context) and len(context) + request.limit - 1 <= self.room

    def begin(self, request: DraftRequest) -> bool:
        """Start a round's draft; False if it needs no call: there is no room, or all of it was drafted ahead."""
        if not self.num_ahead(request.sequence) or (request.rule and not self._confidences):
            self._forget_ahead(request.sequence)
        self.request, self._guessed = request, []
        context = self.context(request.sequence)
        self._num_context = len(context)
        self._cut()
        self.slot.trim(max(len(context) + len(self._token_ids) - 1, 0))  # the last one is read again, for its row
        there = self.slot.length
        self.unread = context[there:] + self._token_ids[max(there - len(context), 0) :]
        if self._token_ids:
            return self.wants_more
        return self.has_room(request)

    def _cut(self) -> None:
        """Cut the tokens that were drafted ahead to what this round wants."""
        rule, count = self.request.rule, min(len(self._token_ids), self.request.limit)
        # As with tokens drawn one by one, a token itself does not decide whether it is wanted.
        num_wanted = next((n for n in range(1, count) if rule and not rule.wants_more(self._confidences[:n])), count)
        for values in (self._token_ids, self._probs, self._confidences, self._runners_up, self._branches):
            del values[num_wanted:]

    def next_chunk(self, piece: int) -> Chunk:
        """Up to `piece` of the unread tokens, for one call. Its last row is wanted if these are all."""
        is_last = len(self.unread) <= piece
        is_short = is_last and len(self.unread) <= SHORT
        return Chunk(self.slot, self.unread[:piece], num_rows=int(is_last), generated=is_short)

    def take(self, rows: Sequence[LogitsRow], hidden: NDArray[np.float32] | None) -> None:  # noqa: ARG002
        """Take in what a call has given: the rows that its chunk wanted, and its hidden states, if it asked for any."""
        for row in rows:
            self.choose(row)

    @property
    def wants_more(self) -> bool:
        """Whether another call may add a token."""
        return self._is_unfinished

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        """Trim the cache to the last accepted token, or to the tokens drafted ahead if the guess was right."""
        num_context, self._num_context = self._num_context, None
        if self.num_ahead(sequence):
            return
        self._forget_ahead(sequence)
        if num_context is not None:  # else another drafter made this round's draft
            self.slot.trim(num_context + self._num_first(committed.path))

    def _num_first(self, path: Sequence[int]) -> int:
        """Accepted tokens whose keys and values are in the slot: those of the chain of first candidates."""
        return next((depth for depth, i in enumerate(path) if i != depth), len(path))

    def guess(
        self, draft: Draft, chance: Callable[[float], float] = lambda confidence: confidence, next_chance: float = 0.75
    ) -> Guess | None:
        """The likeliest outcome of this round's draft, among those that the next draft can start from.

        None if there is none. chance: a token's probability of acceptance, by its confidence. next_chance: the
        probability that the bonus token is the one that the draft model expects.
        """
        request = self.request
        if not (self.can_draft_ahead and self.unread and draft.token_ids and draft.token_ids == self._token_ids):
            return None  # it ended early, was cut, or is another drafter's
        if len(request.sequence) + len(draft) + request.limit > self.room:
            return None
        reached, guesses = 1.0, []
        for i, (confidence, runner_up) in enumerate(zip(self._confidences, self._runners_up, strict=True)):
            accepted = chance(confidence)
            token_id, probability = runner_up or (-1, 0.0)
            if probability and token_id not in request.eos_token_ids and i + 2 < request.num_left:
                share = probability / max(1 - confidence, probability)  # of its rejections
                guesses.append(Guess(reached * (1 - accepted) * share, i, token_id))
            reached *= accepted
        if draft.token_ids[-1] not in request.eos_token_ids:
            guesses.append(Guess(reached * next_chance, len(draft)))
        return max(guesses, key=lambda guess: guess.chance, default=None)

    def begin_ahead(self, draft: Draft, guess: Guess) -> None:
        """Start to draft ahead, as if `guess` were the outcome of this round's draft."""
        self._num_committed = len(self.request.sequence)
        self._clear()
        if guess.token_id is None:  # the first token to be chosen is the expected bonus token
            self._token_ids = [*draft.token_ids]
            return
        self._guessed = [*draft.token_ids[: guess.num_accepted], guess.token_id]
        self.unread = [guess.token_id]
        self.slot.trim(len(self.context(self.request.sequence)) + guess.num_accepted)

    def goes_on_ahead(self) -> bool:
        """Take in the token that was chosen last. Returns whether another one may follow."""
        request = self.request
        if not self.unread or self.unread[-1] in request.eos_token_ids:
            return False
        if not self._guessed:
            guessed = self._token_ids
            self._clear()
            self._guessed = guessed
        return len(self._token_ids) < min(request.limit, request.num_left - len(self._guessed) - 1)

    def num_ahead(self, sequence: TokenSequence) -> int:
        """Tokens of the next draft that were drafted ahead; 0 if the guess was wrong."""
        came_true = bool(self._guessed) and sequence.token_ids[self._num_committed :] == self._guessed
        return len(self._token_ids) if came_true else 0

    def _forget_ahead(self, sequence: TokenSequence) -> None:
        """Drop what was drafted ahead. Trim the cache to the tokens of the guess that were committed."""
        if self._guessed:
            said = sequence.token_ids[self._num_committed :]
            self.slot.trim(self._num_committed + num_common_tokens(self._guessed, said))
        self._clear()


class MaskedState(DraftState):
    """With a draft model that drafts all tokens in one call: masks stand for those after the first."""

    can_draft_ahead = False

    def __init__(self, slot: Slot, room: int, mask_token_ids: Sequence[int]) -> None:
        super().__init__(slot, room)
        self._mask_token_ids = [*mask_token_ids]

    def next_chunk(self, piece: int) -> Chunk:
        """Up to `piece` of the unread tokens; after all of them the masks. A mask reads those before it."""
        chunk = super().next_chunk(piece)
        if not chunk.num_rows:
            return chunk
        masks = self._mask_token_ids[: self.request.limit - 1]
        return replace(chunk, token_ids=[*chunk.token_ids, *masks], num_rows=len(masks) + 1)

    def take(self, rows: Sequence[LogitsRow], hidden: NDArray[np.float32] | None) -> None:  # noqa: ARG002
        """Drop the masks from the slot, and take the draft."""
        self.slot.trim(len(self.request.sequence))
        self.choose_all(rows)

    @property
    def wants_more(self) -> bool:
        """Never: one call gives the whole draft."""
        return False
