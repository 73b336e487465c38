"""The state of one sequence in a drafter that reads the main model's hidden states."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.draft_state import DraftState
from outrider.drafters.markov import Correction, MarkovHead
from outrider.models.backends.features import BLOCK_STATES, NEXT_HIDDEN
from outrider.models.cost.table import SHORT
from outrider.types import Chunk, Committed, Distribution, DraftRequest, LogitsRow, Slot, TokenSequence


class HiddenState(DraftState):
    """Keeps the main model's hidden states until the drafter reads them, at the beginning of the next draft.

    slot: in the drafter's cache. position: of the next hidden states in the text. The slot holds fewer tokens than that
    if part of the context is missing.
    """

    can_draft_ahead = False
    ahead: ClassVar[int] = 0  # positions from hidden states to the token that is read with them

    def __init__(self, slot: Slot, room: int, position: int) -> None:
        super().__init__(slot, room)
        # The drafter's prefix may end one token before the main model's. That token is read with the hidden states that
        # come next, which are not quite its own.
        self._is_behind = slot.length == position - 1
        self.is_whole = self._is_behind or slot.length == position
        self._is_full = False  # the drafter's context is too short: nothing is drafted any more
        self.num_read = slot.length  # tokens in the slot whose hidden states are the main model's
        self._position = position
        self._kept: list[NDArray[np.float32]] = []
        self._sequence: TokenSequence | None = None

    @property
    def num_unread(self) -> int:
        """Tokens whose hidden states were not read yet."""
        return sum(map(len, self._kept))

    @property
    def has_space(self) -> bool:
        """Whether these fit in the slot, with a row after them."""
        return self.num_read + self.num_unread < self.room

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        """Drop the draft from the slot, and keep the main model's hidden states as long as there is room for them."""
        self._sequence = sequence
        self.slot.trim(self.num_read)
        self._clear()
        if committed.features is None or not len(committed.features) or self._is_full:
            return
        rows = np.array(committed.features)  # theirs are valid until the next call
        if self._is_behind:
            rows, self._position, self._is_behind = np.concatenate([rows[:1], rows]), self._position - 1, False
        self._kept.append(rows)
        if not self.has_space:
            self._kept, self._is_full = [], True

    def has_room(self, request: DraftRequest) -> bool:
        """Whether the hidden states and a draft fit in the slot, and are those of the sequence's end."""
        complete = bool(self._kept) and self._position + self.num_unread == len(request.sequence) - 1
        return complete and self.num_read + self.num_unread + request.limit <= self.room

    def begin(self, request: DraftRequest) -> bool:
        """Start a round's draft; False if there is no room."""
        self.request = request
        self._clear()
        self.slot.trim(self.num_read)
        self.unread = request.sequence.token_ids[-1:] if self.has_room(request) else []
        return bool(self.unread)

    def kept(self, piece: int) -> tuple[list[int], NDArray[np.float32], bool]:
        """Up to `piece` tokens with their hidden states, float32 [n, width], and whether these are all."""
        if self._sequence is None:
            raise AssertionError("`observe` has given the hidden states")
        rows = self._kept[0] if len(self._kept) == 1 else np.concatenate(self._kept)
        self._kept = [rows]
        count, begin = min(piece, len(rows)), self._position + self.ahead
        return self._sequence.token_ids[begin : begin + count], rows[:count], count == len(rows)

    def context_chunk(self, piece: int) -> Chunk:
        """Up to `piece` tokens with their hidden states, and no row of logits."""
        token_ids, rows, _ = self.kept(piece)
        return Chunk(self.slot, token_ids, 0, hidden_states=rows)

    def drop_read(self) -> None:
        """Drop the hidden states that a call has read."""
        count = self.slot.length - self.num_read
        self.num_read += count
        self._position += count
        left = self._kept[0][count:]
        self._kept = [left] if len(left) else []


class ModuleState(HiddenState):
    """In a module that drafts token by token, and reads its own hidden states after the main model's.

    input_width: numbers that it reads beside a token. The main model's hidden states are at the beginning, its own at
    the end; if both have this width, they take the same place. The rest is zeros.
    """

    ahead = 1

    def __init__(self, slot: Slot, room: int, position: int, input_width: int) -> None:
        super().__init__(slot, room, position)
        self._input_width = input_width
        self._own: NDArray[np.float32] | None = None  # [1, its width], after the draft's newest token

    def begin(self, request: DraftRequest) -> bool:
        """Start a round's draft; False if there is no room."""
        self._own = None
        return super().begin(request)

    def next_chunk(self, piece: int) -> Chunk:
        """What was kept, or the draft's newest token with the module's own hidden states."""
        if self._own is not None:
            return self._chunk(self.unread, self._pad(self._own, is_own=True), wants_row=True)
        token_ids, rows, is_last = self.kept(piece)
        return self._chunk(token_ids, self._pad(rows, is_own=False), wants_row=is_last)

    def context_chunk(self, piece: int) -> Chunk:
        """Up to `piece` tokens with their hidden states, and no row of logits."""
        token_ids, rows, _ = self.kept(piece)
        return self._chunk(token_ids, self._pad(rows, is_own=False), wants_row=False)

    def _chunk(self, token_ids: Sequence[int], rows: NDArray[np.float32], *, wants_row: bool) -> Chunk:
        wanted, is_short = (NEXT_HIDDEN,) if wants_row else (), len(token_ids) <= SHORT
        return Chunk(self.slot, token_ids, int(wants_row), wanted, generated=is_short, hidden_states=rows)

    def _pad(self, rows: NDArray[np.float32], *, is_own: bool) -> NDArray[np.float32]:
        """Hidden states in their place of the input."""
        width = rows.shape[1]
        if width == self._input_width:
            return rows
        made = np.zeros((len(rows), self._input_width), dtype=np.float32)  # NumPy's pad takes 0.1 ms
        made[:, self._input_width - width if is_own else 0 :][:, :width] = rows
        return made

    def take(self, rows: Sequence[LogitsRow], hidden: NDArray[np.float32] | None) -> None:
        """Take in a call. Its last hidden states are those after the next draft token."""
        if self._own is None:
            self.drop_read()
        if hidden is not None:
            self._own = np.array(hidden[-1:])
        super().take(rows, hidden)


class BlockState(HiddenState):
    """In a drafter that fills in a block of masks. mask_token_ids: the block after the newest token."""

    def __init__(self, slot: Slot, room: int, position: int, mask_token_ids: Sequence[int]) -> None:
        super().__init__(slot, room, position)
        self._mask_token_ids = [*mask_token_ids]

    def next_chunk(self, piece: int) -> Chunk:
        """What was kept, and after all of it the block."""
        token_ids, rows, is_last = self.kept(piece)
        if not is_last:
            return self.context_chunk(piece)
        block = [*token_ids, self.request.sequence.token_ids[-1], *self._mask_token_ids]
        return Chunk(self.slot, block, len(self._mask_token_ids), hidden_states=rows)

    def context_chunk(self, piece: int) -> Chunk:
        """Up to `piece` tokens with their hidden states, and no row of logits. A block is never empty."""
        token_ids, rows, _ = self.kept(piece)
        return Chunk(self.slot, [*token_ids, self._mask_token_ids[0]], 0, hidden_states=rows)

    def take(self, rows: Sequence[LogitsRow], hidden: NDArray[np.float32] | None) -> None:  # noqa: ARG002
        """Take in a call, and with it the whole draft."""
        self.drop_read()
        self.choose_all(rows)

    @property
    def wants_more(self) -> bool:
        """Never: one call gives the whole draft."""
        return False


class MarkovState(BlockState):
    """In a block drafter whose rows are corrected by the tokens before them.

    mask_token_ids: as many as the tokens that it drafts. Where the newest token drafts, too, all but one are read.
    """

    def __init__(self, slot: Slot, room: int, position: int, mask_token_ids: Sequence[int], head: MarkovHead) -> None:
        super().__init__(slot, room, position, mask_token_ids)
        self._head = head
        self._correction: Correction | None = None  # of this round's draft
        self._chance: float | None = None  # of the newest token's acceptance, if the head says it

    def next_chunk(self, piece: int) -> Chunk:
        """What was kept, and after all of it the block, without its last mask if the newest token drafts."""
        chunk = super().next_chunk(piece)
        if not chunk.num_rows:
            return chunk
        features = (BLOCK_STATES,) if self._head.reads_states else ()
        token_ids = chunk.token_ids[:-1] if self._head.newest_drafts else chunk.token_ids
        return replace(chunk, token_ids=token_ids, features=features)

    def take(self, rows: Sequence[LogitsRow], hidden: NDArray[np.float32] | None) -> None:
        """Take in a call, and with it the whole draft."""
        self._correction = self._head.correction(hidden)
        super().take(rows, hidden)

    def choose(self, latest: LogitsRow) -> None:
        """Take the next token from its row, once that is corrected."""
        if self._correction is None:
            raise AssertionError("`take` makes it")
        before = self._token_ids[-1] if self._token_ids else self.request.sequence.token_ids[-1]
        corrected, self._chance = self._correction.next(latest, before)
        super().choose(corrected)

    def _confidence(self, latest: LogitsRow, drawn: Distribution | None, token_id: int) -> float:
        return super()._confidence(latest, drawn, token_id) if self._chance is None else self._chance
