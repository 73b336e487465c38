"""Drafts from some of the main model's own layers."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.draft_model import DraftModel
from outrider.drafters.draft_state import DraftState
from outrider.types import Draft, DraftRequest, TokenSequence


class SelfModel(DraftModel):
    """A drafter that leaves out layers of the main model, and reads what the main model has in its cache.

        SelfModel(OpenVINOLayers(main, kept), context_length=2048)

    It has no slots of its own: a draft is written after the sequence in the main model's slot, as far as the layers
    go. It is trimmed, and the target pass writes all layers there anew. So no prompt is read a second time, and nothing
    can be drafted ahead.

    Zhang et al. 2023, "Draft & Verify: lossless large language model acceleration via self-speculative decoding"; Xia
    et al. 2024, "SWIFT: on-the-fly self-speculative decoding for LLM inference acceleration". With the first layers
    alone: Elhoushi et al. 2024, "LayerSkip: enabling early exit inference and self-speculative decoding".
    """

    goes_ahead = False

    def reserve(self, sequence: TokenSequence, max_tokens: int, num_cached: int = 0) -> bool:  # noqa: ARG002
        """True: the main model's slot is enough."""
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft of `limit` tokens for each request. The main model's slots are left as they were."""
        made = {request.sequence: self._state_of(request) for request in requests}
        self._states = {sequence: state for sequence, state in made.items() if state is not None}
        try:
            return super().propose(requests)
        finally:  # the main model reads on there, even if this fails
            for sequence, state in self._states.items():
                state.slot.trim(len(sequence) - 1)
            self._states.clear()

    def _state_of(self, request: DraftRequest) -> DraftState | None:
        """A draft that begins; None if there can be none."""
        return None if request.slot is None else _SelfState(request.slot, len(request.sequence) + request.limit)

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether it is known where the main model's keys and values are."""
        return request.slot is not None

    def num_unread(self, sequence: TokenSequence) -> int:  # noqa: ARG002
        """1: the newest token. The main model has read the others."""
        return 1


class _SelfState(DraftState):
    """One draft. There is nothing to keep from one to the next."""

    can_draft_ahead = False
