"""Drafts from modules and heads that read the main model's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from outrider.drafters.draft_model import DraftModel
from outrider.drafters.hidden_state import BlockState, HiddenState, MarkovState, ModuleState
from outrider.drafters.markov import MarkovHead
from outrider.models.calls import submit
from outrider.types import NO_PROMPT, Backend, Committed, Prompt, Requirements, Slot, TokenSequence, embed_keys

_MAX_KEPT_TOKENS = 256  # tokens whose hidden states are kept, before the drafter reads them


class HiddenModel(DraftModel):
    """A drafter that reads the main model's hidden states.

        HiddenModel.module(backend, features, input_width=2304, context_length=2048)
        HiddenModel.block(backend, features, [mask] * 7, context_length=2048)

    Where the main model's prefix cache has more of a prompt than the drafter's, the hidden states of the rest are not
    known. Then it drafts without that part of the context.

    features: the names of the hidden states. new_state: makes a sequence's state from a slot, its room and the position
    of the first hidden states. ahead: see `HiddenState.ahead`. spare: positions of the slot after the context, for a
    block. at_once, most_tokens: see `Drafter`.
    """

    goes_ahead = False
    replays = False  # the hidden states are gone

    def __init__(
        self,
        backend: Backend,
        features: tuple[str, ...],
        new_state: Callable[[Slot, int, int], HiddenState],
        *,
        ahead: int = 0,
        spare: int = 0,
        at_once: bool = False,
        most_tokens: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(backend, **options)
        self.at_once, self.most_tokens = at_once, most_tokens
        self.requirements = Requirements(features)
        self._new_state, self._ahead, self._spare = new_state, ahead, spare

    @classmethod
    def module(cls, backend: Backend, features: tuple[str, ...], input_width: int, **options: Any) -> HiddenModel:
        """A module that drafts token by token: EAGLE-3 or MTP. input_width: see `ModuleState`.

        It reads hidden states together with the next token, and its logits are for the token after that (Li et al.
        2024, "EAGLE: speculative sampling requires rethinking feature uncertainty", section 4.1).
        """

        def state(slot: Slot, room: int, position: int) -> HiddenState:
            return ModuleState(slot, room, position, input_width)

        return cls(backend, features, state, ahead=ModuleState.ahead, **options)

    @classmethod
    def block(
        cls,
        backend: Backend,
        features: tuple[str, ...],
        mask_token_ids: list[int],
        markov: MarkovHead | None = None,
        **options: Any,
    ) -> HiddenModel:
        """A drafter that fills in a block of masks after the newest token.

        markov: corrects what it drafts; see `MarkovState`.
        """

        def state(slot: Slot, room: int, position: int) -> HiddenState:
            if markov is not None:
                return MarkovState(slot, room, position, mask_token_ids, markov)
            return BlockState(slot, room, position, mask_token_ids)

        count = len(mask_token_ids)
        size = count + (markov is None or not markov.newest_drafts)
        return cls(backend, features, state, spare=size, at_once=True, most_tokens=count, **options)

    def seconds_for(self, num_tokens: Sequence[int], context: float, before: int | None = None) -> float:
        """Seconds of one call, with the rows of its block. See `Drafter`."""
        return super().seconds_for([count + self._spare for count in num_tokens], context, before)

    def prompt_of(self, sequence: TokenSequence) -> Prompt:
        """What the drafter reads of a sequence that begins. From any thread."""
        # A drafter that reads hidden states with the next token reads those of the first token, but never the
        # token: so it is part of the scope.
        scope = b"%d " % embed_keys(sequence.token_ids[:1], sequence.embeds)[0] + sequence.scope
        embeds = tuple(replace(span, begin=span.begin - self._ahead) for span in sequence.embeds)
        return Prompt(sequence.token_ids[self._ahead :], scope, embeds)

    def reserve(self, sequence: TokenSequence, max_tokens: int, num_cached: int = 0) -> bool:
        """Open a slot for a sequence that may grow to `max_tokens`; False while there is no room."""
        room = min(max_tokens, self._context_length)
        prompt = self.prompt_of(sequence)
        # Its last token is never found.
        prompt = replace(prompt, token_ids=[*prompt.token_ids[:num_cached], 0])
        slot = self.backend.open(room + self._spare, prompt if self._reuse else NO_PROMPT)
        if slot is None:
            return False
        self._states[sequence] = self._new_state(slot, room, num_cached)
        return True

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        """Keep the hidden states of committed tokens. Those of a long prompt are read now, to take little memory."""
        state = self._states.get(sequence)
        if isinstance(state, HiddenState):
            state.observe(sequence, committed)
            if state.num_unread > _MAX_KEPT_TOKENS and state.has_space:
                self._read_context(state, left=1)  # with which the next draft begins

    def num_unread(self, sequence: TokenSequence) -> int:
        """Committed tokens to read before the next draft; 0 for a sequence without a slot."""
        state = self._states.get(sequence)
        return state.num_unread if isinstance(state, HiddenState) else 0

    def release(self, sequence: TokenSequence) -> None:
        """Drop a sequence's state and close its slot. What it has read is published, unless a part is missing."""
        state = self._states.pop(sequence, None)
        if not isinstance(state, HiddenState):
            return
        try:
            if self._reuse and state.is_whole and state.num_read:
                state.slot.trim(state.num_read)
                if state.num_unread and state.has_space:
                    self._read_context(state)
                state.slot.publish(sequence.token_ids[self._ahead : self._ahead + state.num_read])
        finally:
            state.slot.close()

    def _read_context(self, state: HiddenState, left: int = 0) -> None:
        """Read the hidden states that are kept, except for the last `left`."""
        while (count := state.num_unread - left) > 0:
            submit(self.backend, [state.context_chunk(min(count, self._max_num_batched_tokens))]).wait()
            state.drop_read()
            if self.cost:
                self.cost.observe((), 0.0, 0.0)  # nothing is learned from such calls
