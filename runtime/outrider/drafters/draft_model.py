"""Drafts from a smaller model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Self

from outrider.decoding.row_budget import RowBudget
from outrider.drafters.draft_state import MaskedState
from outrider.drafters.vocabulary import DraftVocabulary
from outrider.models.calls import submit, teach
from outrider.models.cost.table import SHORT
from outrider.types import NO_DRAFT, NO_PROMPT, Draft, Drafter, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from outrider.drafters.draft_state import DraftState
    from outrider.drafters.vocabulary import Subset
    from outrider.models.cost.table import CallCost
    from outrider.types import Backend, Committed, DraftRequest, Guess, Pending, TokenSequence

_READING_SHARE = 0.5  # of a round's seconds, for reading prompts; the rest is the main model's


class DraftModel(Drafter):
    """A smaller model that proposes tokens.

    The request's verifier draws the tokens, with the same processors as the main model's, so that draft_probs are as
    near to target_probs as possible (Leviathan et al. 2022, section 2). Several sequences are drafted in one call,
    token by token.

    A model in fixed shapes drafts for one sequence at a time, and only for prompts that fit its sizes. Other sequences
    do not wait: their drafts are empty.

    context_length: the model's longest context. vocabulary: converts between its tokens and the main model's; by
    default they are the same. subset: the tokens that it has logits for; by default all. reuse: whether sequences start
    from cached prefixes, and publish their own. cost: the seconds of the model's calls; without it, the controller does
    not choose this drafter. mask_token_ids: stand for the draft's tokens but the first, in a model that was trained to
    draft all of them in one call (An et al. 2025, "PARD: accelerating LLM inference with low-cost parallel draft model
    adaptation").
    """

    num_assistant_tokens = 3
    takes_rules = True
    goes_ahead = True
    replays = True

    def __init__(
        self,
        backend: Backend,
        *,
        context_length: int,
        max_num_batched_tokens: int = 512,
        max_round_seconds: float | str = "auto",
        vocabulary: DraftVocabulary | None = None,
        subset: Subset | None = None,
        reuse: bool = True,
        cost: CallCost | None = None,
        mask_token_ids: Sequence[int] = (),
    ) -> None:
        self._mask_token_ids = tuple(mask_token_ids)
        if mask_token_ids:
            self.at_once, self.most_tokens, self.goes_ahead = True, len(mask_token_ids) + 1, False
        self._context_length = context_length
        self._max_num_batched_tokens, self._max_round_seconds = max_num_batched_tokens, max_round_seconds
        self._vocabulary = vocabulary or DraftVocabulary()
        self._subset = subset
        self._reuse = reuse
        self._begin(backend, cost)

    def _begin(self, backend: Backend, cost: CallCost | None) -> None:
        self.backend, self.cost = backend, cost
        self._states: dict[TokenSequence, DraftState] = {}
        # In fixed shapes, a short piece of a prompt takes as long as a long one.
        limited = None if backend.capabilities.fixed else cost
        self._rows = RowBudget(self._max_num_batched_tokens, self._max_round_seconds, limited, part=_READING_SHARE)

    @property
    def seconds(self) -> float:  # type: ignore[override]
        """Seconds spent in the draft model's calls so far, except for those during target passes."""
        return self.backend.seconds - self.ahead_seconds

    def on(self, backend: Backend, cost: CallCost | None = None) -> Self:
        """A drafter of the same model with another backend, and with the cost of its calls."""
        made = copy.copy(self)
        made.ahead_seconds = 0.0
        made._begin(backend, cost)
        return made

    def prompt_of(self, sequence: TokenSequence) -> Prompt:
        """What the model reads of a sequence that begins. From any thread."""
        context = self._vocabulary.context(sequence.token_ids)
        return Prompt(context, sequence.scope, source=sequence.source)

    def reserve(self, sequence: TokenSequence, max_tokens: int, num_cached: int = 0) -> bool:  # noqa: ARG002
        """Open a slot for a sequence that may grow to `max_tokens`; False while there is no room.

        True without a slot if a model in fixed shapes has none for it: the sequence then gets empty drafts.
        """
        room = min(self._vocabulary.room(max_tokens), self._context_length)
        fixed = self.backend.capabilities.fixed
        whole = self.prompt_of(sequence) if self._reuse or fixed else NO_PROMPT
        if fixed and len(whole.token_ids) > fixed.max_prompt_tokens:
            return True
        source = sequence.source
        slot = self.backend.open(room, whole if self._reuse else Prompt((), source=source) if source else NO_PROMPT)
        if slot is None:
            return fixed is not None
        masks = self._mask_token_ids
        self._states[sequence] = MaskedState(slot, room, masks) if masks else self._vocabulary.new_state(slot, room)
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft of `limit` tokens for each request; empty if it does not fit the draft model's context.

        A long prompt is read piece by piece, at most one per round. Until it is read, its drafts are empty. Between two
        calls those that were cancelled are left out: a draft may take seconds.
        """
        states = [self._states.get(request.sequence) for request in requests]
        both = zip(states, requests, strict=True)
        active = [state for state, request in both if state is not None and state.begin(request)]
        active = _wanted(active)
        counts = self._share(active)
        pieces = [count for count in counts if count]
        active = [state for state, count in zip(active, counts, strict=True) if count]
        if active:
            self._read(active, pieces)
            active = _wanted(state for state in active if state.wants_more)
        while active:
            self._read(active, [self._max_num_batched_tokens] * len(active))
            active = _wanted(state for state in active if state.wants_more)
        return [NO_DRAFT if state is None else state.draft for state in states]

    def guess(
        self, request: DraftRequest, draft: Draft, chance: Callable[[float], float], next_chance: float
    ) -> Guess | None:
        """The likeliest outcome of a draft of this model, among those that it can draft ahead for; see `Drafter`."""
        state = self._states.get(request.sequence)
        return state.guess(draft, chance, next_chance) if state else None

    def draft_ahead(
        self,
        requests: Sequence[DraftRequest],
        drafts: Sequence[Draft],
        check: Pending,
        guesses: Sequence[Guess | None] | None = None,
        max_calls: int | None = None,
    ) -> None:
        """Draft for the next round during this round's target pass `check`, until that is done.

        The next draft starts from a guessed outcome, by default the likeliest one. Either the whole draft is accepted
        and the bonus token is the one that the draft model expects, or one token is rejected and the next best is
        recovered (Liu et al. 2024, "PEARL: parallel speculative decoding with adaptive draft length"; McDanel 2024,
        "AMUSD: asynchronous multi-device speculative decoding"). If the guess is wrong, only time is lost.
        """
        if check.done:
            return
        began = self.backend.seconds
        active = []
        for i, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            state = self._states.get(request.sequence)
            guess = guesses[i] if guesses else state.guess(draft) if state else None
            if state and guess:
                state.begin_ahead(draft, guess)
                active.append(state)
        num_calls = 0
        while active and not (num_calls and check.done) and num_calls != max_calls:
            self._read(active, [1] * len(active), is_alone=False)
            num_calls += 1
            active = [state for state in active if state.goes_on_ahead()]
        self.ahead_seconds += self.backend.seconds - began

    def _share(self, states: Sequence[DraftState]) -> list[int]:
        """How many tokens of each sequence the next call reads: all, or if these are many, a piece or none."""
        unread = [state.num_unread for state in states]
        limited = any(state.request.together > 1 for state in states)
        contexts = [state.slot.length for state in states]
        return self._rows.share(unread, [count <= SHORT for count in unread], contexts, limited=limited)

    def _read(self, states: Sequence[DraftState], pieces: Sequence[int], *, is_alone: bool = True) -> None:
        """Read up to `pieces` tokens of each sequence. Choose the next ones of those that are read to the end.

        is_alone: no other model's call runs meanwhile, so that the cost learns from this one.
        """
        chunks = [state.next_chunk(piece) for state, piece in zip(states, pieces, strict=True)]
        read, began = [(len(chunk.token_ids), chunk.slot.length) for chunk in chunks], self.backend.seconds
        step = submit(self.backend, chunks, states[0].request.observer).wait()  # a round has one observer
        if self.cost:
            short, long = (
                [each for each in read if is_alone and (each[0] <= SHORT) == is_short] for is_short in (True, False)
            )
            teach(self.cost, self.backend, self.backend.seconds - began, short, long)
        for state, chunk in zip(states, chunks, strict=True):
            rows = step.rows(chunk)
            if self._subset:
                rows = [self._subset.row(row) for row in rows]
            state.take(rows, step.features(chunk) if chunk.features else None)

    @property
    def is_priced(self) -> bool:  # type: ignore[override]
        """Whether the cost of the model's calls is known."""
        return self.cost is not None

    def seconds_for(self, num_tokens: Sequence[int], context: float, before: int | None = None) -> float:
        """Seconds of one call; see `Drafter`."""
        if self.cost is None:
            return 0.0
        rows, steady = [n + len(self._mask_token_ids) for n in num_tokens], self.backend.capabilities.steady
        if steady and before is not None:
            rows, before = [steady.peek(self.cost.rule.num_rows(rows))], steady.current
        return self.cost.together(rows, context, before)

    @property
    def first_seconds(self) -> float:  # type: ignore[override]
        """Seconds that the next call takes longer, if none was made since the load."""
        return self.cost.scale * self.cost.first if self.cost and not self.backend.seconds else 0.0

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether the sequence has a slot with room for the draft."""
        state = self._states.get(request.sequence)
        return state is not None and state.has_room(request)

    def num_ahead(self, sequence: TokenSequence) -> int:
        """Tokens of the next draft that were drafted ahead."""
        state = self._states.get(sequence)
        return state.num_ahead(sequence) if state else 0

    def num_unread(self, sequence: TokenSequence) -> int:
        """Committed tokens to read before the next draft; 0 for a sequence without a slot."""
        state = self._states.get(sequence)
        return max(len(sequence) - state.slot.length, 0) if state else 0

    def observe(self, sequence: TokenSequence, committed: Committed) -> None:
        """Trim the cache to the last accepted token."""
        if state := self._states.get(sequence):
            state.observe(sequence, committed)

    def release(self, sequence: TokenSequence) -> None:
        """Drop a sequence's state and close its slot."""
        if state := self._states.pop(sequence, None):
            try:
                if self._reuse:
                    state.slot.publish(state.context(sequence))
            finally:
                state.slot.close()


def _wanted(states: Iterable[DraftState]) -> list[DraftState]:
    """Those whose answers were not cancelled."""
    return [state for state in states if not state.request.is_cancelled()]
