"""Drafts from the main model itself, at mask tokens that it reads behind the text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from outrider.drafters.choices import Choices
from outrider.types import Committed, Draft, Drafter, DraftRequest, LogitsRow, Requirements, Sequence


class MaskTokens(Drafter):
    """Proposes what the main model predicted at its mask tokens in the round before, and asks for the next ones.

        MaskTokens(num_masks=4)

    The target pass reads mask tokens behind the newest token and behind each draft token (`Draft.num_masks`). Those
    behind the last accepted one stand for the tokens of the next draft. So a draft takes no call, but rows of the
    target pass. A round without masks is followed by one without a draft.

    num_masks: how many the main model has, and the most tokens of a draft.

    Source: Monea et al. 2023, "PaSS: parallel speculative sampling"; Chen et al. 2024, "Hardware-aware parallel prompt
    decoding for memory-efficient acceleration of LLM inference".
    """

    num_assistant_tokens = 2
    takes_rules = is_priced = at_once = True

    def __init__(self, num_masks: int) -> None:
        self.most_tokens = num_masks
        self.requirements = Requirements(num_masks=num_masks)
        self._states: dict[Sequence, _State] = {}

    def reserve(self, sequence: Sequence, max_tokens: int, num_cached: int = 0) -> bool:  # noqa: ARG002
        """Start without a draft. There is always room."""
        self._states[sequence] = _State()
        return True

    def propose(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """For each request a draft with masks behind its rows, as far as its rule wants them."""
        return [self._states[request.sequence].draft_for(request, self.requirements.num_masks) for request in requests]

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Keep the rows at the masks behind the last committed token."""
        if state := self._states.get(sequence):
            state.rows = [row.copied() for row in committed.masks]

    def release(self, sequence: Sequence) -> None:
        """Drop a sequence's state."""
        self._states.pop(sequence, None)

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether masks can be read for the sequence, or were."""
        return request.sequence in self._states

    def num_ahead(self, sequence: Sequence) -> int:
        """Tokens of the next draft, which the round before has paid for."""
        state = self._states.get(sequence)
        return len(state.rows) if state else 0


class _State(Choices):
    """One sequence. rows: at the masks behind its newest token but one, the first for the token behind the newest."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Seq[LogitsRow] = ()

    def draft_for(self, request: DraftRequest, most: int) -> Draft:
        """A draft, and the masks for the next one."""
        self.request = request
        self._clear()
        self.choose_all(self.rows)
        rule, most = request.rule, min(most, request.limit)
        num_masks = rule.num_masks(self._confidences, most) if rule else [most] * (len(self._token_ids) + 1)
        if self._token_ids and self._token_ids[-1] in request.eos_token_ids:
            num_masks[len(self._token_ids)] = 0  # nothing follows
        return replace(self.draft, num_masks=num_masks)
