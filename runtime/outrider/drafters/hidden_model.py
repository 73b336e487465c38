"""Drafts from a module that reads the main model's hidden states: EAGLE, EAGLE-3 and MTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outrider.calls import submit
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.draft_state import DraftState
from outrider.measure import SHORT
from outrider.types import NO_PROMPT, Chunk, Prompt, Requirements

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from numpy.typing import NDArray

    from outrider.drafters.vocabulary import Subset
    from outrider.measure import PassCost
    from outrider.types import Backend, Committed, DraftRequest, LogitsRow, Sequence, Slot

NEXT_HIDDEN = "next_hidden"  # the module's own hidden states, among its backend's features
_MOST_KEPT = 256  # rows of hidden states that are kept, before the module reads them


class HiddenModel(DraftModel):
    """A module that reads the main model's hidden states, and in a draft its own.

    Its token t is the main model's token t + 1, with the main model's hidden states at t. So it is always one token
    behind the main model, and reads what a round has committed at the beginning of the next draft. Its logits are for
    token t + 2 (Li et al. 2024, "EAGLE: speculative sampling requires rethinking feature uncertainty", section 4.1).

    Where the main model's prefix cache has more of a prompt than the module's, the hidden states of the rest are not
    known. Then the module drafts without that part of the context.

    features: the names of the main model's hidden states. width: numbers of all of them. own_width: numbers of its own;
    if both are the same, they take the same place in its input, otherwise its own are behind the main model's.
    """

    goes_ahead = False

    def __init__(
        self,
        backend: Backend,
        *,
        context_length: int,
        features: tuple[str, ...],
        width: int,
        own_width: int,
        max_num_batched_tokens: int = 512,
        subset: Subset | None = None,
        reuse: bool = True,
        cost: PassCost | None = None,
    ) -> None:
        super().__init__(
            backend,
            context_length=context_length,
            max_num_batched_tokens=max_num_batched_tokens,
            subset=subset,
            reuse=reuse,
            cost=cost,
        )
        self.requirements = Requirements(features)
        self._width, self._own_width = width, own_width

    def reserve(self, sequence: Sequence, max_tokens: int, num_cached: int = 0) -> bool:
        """Open a slot for a sequence that may grow to `max_tokens`; False while there is no room."""
        room = min(max_tokens, self._context_length)
        # The first token is in no input of the module, but its hidden states depend on it.
        scope = sequence.scope + b"%d" % sequence.token_ids[0]
        prompt = Prompt(sequence.token_ids[1 : num_cached + 1], scope) if self._reuse else NO_PROMPT
        slot = self.backend.open(room, prompt)
        if slot is None:
            return False
        self._states[sequence] = HiddenState(slot, room, num_cached, self._width, self._own_width)
        return True

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Keep the hidden states of committed tokens. Many are read at once, so that they take little memory."""
        state = self._states.get(sequence)
        if state is None:
            return
        state.observe(sequence, committed)
        while isinstance(state, HiddenState) and state.num_unread >= _MOST_KEPT and state.has_space:
            chunk = state.true_chunk(self._max_num_batched_tokens, wants_row=False)
            submit(self.backend, [chunk]).wait()
            state.drop_read(len(chunk.token_ids))

    def num_unread(self, sequence: Sequence) -> int:
        """Committed tokens to read before the next draft; 0 for a sequence without a slot."""
        state = self._states.get(sequence)
        return state.num_unread if isinstance(state, HiddenState) else 0

    def release(self, sequence: Sequence) -> None:
        """Drop a sequence's state and close its slot. What it read of the text is published, if nothing is missing."""
        state = self._states.pop(sequence, None)
        if isinstance(state, HiddenState):
            try:
                if self._reuse and state.is_whole:
                    state.slot.publish(sequence.token_ids[1 : state.num_read + 1])
            finally:
                state.slot.close()


class HiddenState(DraftState):
    """One sequence in such a module: hidden states to read, and this round's draft.

    position: of the next hidden states. The slot holds fewer tokens if part of the context is missing.
    """

    can_draft_ahead = False

    def __init__(self, slot: Slot, room: int, position: int, width: int, own_width: int) -> None:
        super().__init__(slot, room)
        # The module's prefix may end one token before the main model's, whose next token was another one then. It is
        # read again with the hidden states that come next, which are not quite its own.
        self._is_behind = slot.length == position - 1
        self.is_whole = self._is_behind or slot.length == position
        self.num_read = slot.length  # inputs in the slot that come from the main model
        self._position = position
        self._width, self._own_width = width, own_width
        self._kept: list[NDArray[np.float32]] = []
        self._own: NDArray[np.float32] | None = None  # behind the draft's latest token, [1, own_width]
        self._sequence: Sequence | None = None

    @property
    def num_unread(self) -> int:
        """Rows of hidden states that were not read yet."""
        return sum(map(len, self._kept))

    @property
    def has_space(self) -> bool:
        """Whether the rows fit in the slot."""
        return self.num_read + self.num_unread <= self.room

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Drop the draft from the slot, and keep the main model's hidden states."""
        self._sequence = sequence
        self.slot.trim(self.num_read)
        self._clear()
        if committed.features is not None and len(committed.features):
            rows = np.array(committed.features)  # theirs are valid until the next call
            if self._is_behind:
                rows, self._position, self._is_behind = np.concatenate([rows[:1], rows]), self._position - 1, False
            self._kept.append(rows)

    def has_room(self, request: DraftRequest) -> bool:
        """Whether the hidden states and a draft fit in the slot, and are those of the sequence's end."""
        complete = bool(self._kept) and self._position + self.num_unread == len(request.sequence) - 1
        return complete and self.num_read + self.num_unread + request.limit - 1 <= self.room

    def begin(self, request: DraftRequest) -> bool:
        """Start a round's draft; False if there is no room."""
        self.request, self._own = request, None
        self._clear()
        self.slot.trim(self.num_read)
        self.unread = []
        if not self.has_room(request):
            return False
        self.unread = request.sequence.token_ids[self._position + 1 :]
        return True

    def next_chunk(self, piece: int) -> Chunk:
        """The rows to read, or the draft's latest token with the module's own hidden states."""
        if self._own is None:
            return self.true_chunk(piece, wants_row=True)
        return self._chunk(self.unread, self._own, is_own=True, num_rows=1)

    def true_chunk(self, piece: int, *, wants_row: bool) -> Chunk:
        """Up to `piece` of the kept rows, with the tokens behind them."""
        if self._sequence is None:
            raise AssertionError("`observe` has given the rows")
        rows = self._kept[0] if len(self._kept) == 1 else np.concatenate(self._kept)
        self._kept = [rows]
        begin = self._position + 1
        token_ids = self._sequence.token_ids[begin : begin + min(piece, len(rows))]
        is_last = len(token_ids) == len(rows)
        return self._chunk(token_ids, rows[: len(token_ids)], is_own=False, num_rows=int(wants_row and is_last))

    def _chunk(self, token_ids: Seq[int], rows: NDArray[np.float32], *, is_own: bool, num_rows: int) -> Chunk:
        """A chunk with hidden states in their place."""
        if self._width != self._own_width:
            before, behind = (self._width, 0) if is_own else (0, self._own_width)
            rows = np.pad(rows, ((0, 0), (before, behind)))
        is_short = len(token_ids) <= SHORT
        wanted = (NEXT_HIDDEN,) if num_rows else ()
        return Chunk(self.slot, token_ids, num_rows, wanted, generated=is_short, hidden_states=rows)

    def take(self, rows: Seq[LogitsRow], hidden: NDArray[np.float32] | None) -> None:
        """Take in a call. Its last hidden states are those behind the next draft token."""
        if self._own is None:
            self.drop_read(self.slot.length - self.num_read)
        if hidden is not None:
            self._own = np.array(hidden[-1:])
        super().take(rows, hidden)

    def drop_read(self, count: int) -> None:
        """Drop rows that were read."""
        self.num_read += count
        self._position += count
        left = self._kept[0][count:]
        self._kept = [left] if len(left) else []
