"""Drafts from layers that read the main model's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.draft_state import DraftState
from outrider.drafters.self_model import SelfModel
from outrider.models.backends.features import NEXT_HIDDEN
from outrider.models.cost.table import CallCost
from outrider.types import Backend, Chunk, Committed, DraftRequest, LogitsRow, Requirements, Slot, TokenSequence


class AssistantModel(SelfModel):
    """A drafter that reads the main model's keys and values, and its last hidden states, and writes nothing.

        AssistantModel(OpenVINOAssistant(path, main, main_path=main_path), features, context_length=2048)

    It drafts token by token from the newest token, and reads no prompt.

    features: the names of the hidden states.
    """

    def __init__(self, backend: Backend, features: tuple[str, ...], **options: Any) -> None:
        super().__init__(backend, **options)
        self.requirements = Requirements(features)

    def _begin(self, backend: Backend, cost: CallCost | None) -> None:
        super()._begin(backend, cost)
        self._hidden: dict[TokenSequence, NDArray[np.float32]] = {}  # [1, width], of the newest token that was read

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        """Keep the newest hidden states."""
        if committed.features is not None and len(committed.features):
            self._hidden[sequence] = np.array(committed.features[-1:])  # theirs are valid until the next call
        else:
            self._hidden.pop(sequence, None)

    def release(self, sequence: TokenSequence) -> None:
        """Drop a sequence's hidden states."""
        self._hidden.pop(sequence, None)

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether the main model's hidden states are known."""
        return super().can_draft(request) and request.sequence in self._hidden

    def _state_of(self, request: DraftRequest) -> DraftState | None:
        hidden = self._hidden.get(request.sequence)
        return None if request.slot is None or hidden is None else _AssistantState(request.slot, hidden)


class _AssistantState(DraftState):
    """One draft. All of its tokens are at the newest token's position."""

    can_draft_ahead = False

    def __init__(self, slot: Slot, hidden: NDArray[np.float32]) -> None:
        super().__init__(slot, room=0)
        self._hidden = hidden  # [1, width], of the token before the unread one

    def has_room(self, request: DraftRequest) -> bool:  # noqa: ARG002
        """True: nothing is written."""
        return True

    def begin(self, request: DraftRequest) -> bool:
        """Start a round's draft."""
        self.request, self.unread = request, request.sequence.token_ids[-1:]
        return True

    def next_chunk(self, piece: int) -> Chunk:  # noqa: ARG002
        """The newest token with the hidden states before it."""
        return Chunk(self.slot, self.unread, 1, (NEXT_HIDDEN,), generated=True, hidden_states=self._hidden)

    def take(self, rows: Sequence[LogitsRow], hidden: NDArray[np.float32] | None) -> None:
        """Take in a call: the next token, and the hidden states to read it with."""
        if hidden is not None:
            self._hidden = np.array(hidden)
        super().take(rows, hidden)
