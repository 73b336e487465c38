"""Drafts from a smaller model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.drafters.vocabulary import Vocabulary
from outrider.types import NO_DRAFT, NO_PROMPT, Chunk, Draft, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from outrider.drafters.reader import Reader
    from outrider.drafters.vocabulary import Subset
    from outrider.measure import PassCost
    from outrider.types import Backend, Committed, DraftRequest, Guess, Pending, Sequence


class DraftModel:
    """A smaller model, decoding ahead.

    Tokens are chosen as the request's verifier wants them, through the same processors as the main model's, so that
    draft_probs come as close to target_probs as they can (Leviathan et al. 2022, section 2). Several sequences are
    drafted in one call, token by token.

    A model in fixed shapes drafts for one sequence at a time, and for prompts that it was compiled for. Others wait for
    neither: their drafts are empty.

    context_length: tokens that the model reads at most. vocabulary: how its tokens and the main model's become one
    another; by default they are the same. subset: the tokens that it has logits for; by default all. reuse:
    whether texts begin with what the cache has of them, and leave their tokens there. cost: seconds of the model's
    calls; without it, a controller leaves the model to itself.
    """

    num_assistant_tokens = 3
    takes_rules = goes_ahead = True
    is_free = False

    def __init__(
        self,
        backend: Backend,
        *,
        context_length: int,
        max_num_batched_tokens: int = 512,
        vocabulary: Vocabulary | None = None,
        subset: Subset | None = None,
        reuse: bool = True,
        cost: PassCost | None = None,
    ) -> None:
        self.backend, self.cost = backend, cost
        self._context_length = context_length
        self._max_num_batched_tokens = max_num_batched_tokens
        self._vocabulary = vocabulary or Vocabulary()
        self._subset = subset
        self._reuse = reuse
        self._readers: dict[Sequence, Reader] = {}
        self.ahead_seconds = 0.0  # in calls while the main model was checking

    @property
    def seconds(self) -> float:
        """Time spent in the draft model's calls so far, but for those while the main model was checking."""
        return self.backend.seconds - self.ahead_seconds

    def on(self, backend: Backend, cost: PassCost | None = None) -> DraftModel:
        """Another drafter of the same model, through another backend, whose calls have another cost."""
        return DraftModel(
            backend,
            context_length=self._context_length,
            max_num_batched_tokens=self._max_num_batched_tokens,
            vocabulary=self._vocabulary,
            subset=self._subset,
            reuse=self._reuse,
            cost=cost,
        )

    def reserve(self, sequence: Sequence, max_tokens: int, num_cached: int = 0) -> bool:  # noqa: ARG002
        """Take room in the cache for a sequence that may grow to `max_tokens`; False while there is none.

        A sequence that a model in fixed shapes has no place for goes on without it.
        """
        room = min(self._vocabulary.room(max_tokens), self._context_length)
        fixed = self.backend.capabilities.fixed
        context = self._vocabulary.context(sequence.token_ids) if self._reuse or fixed else ()
        if fixed and len(context) > fixed.max_prompt_tokens:
            return True
        slot = self.backend.open(room, Prompt(context, sequence.scope) if self._reuse else NO_PROMPT)
        if slot is None:
            return fixed is not None
        self._readers[sequence] = self._vocabulary.reader(slot, room)
        return True

    def propose(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """A draft of `limit` tokens for each request, an empty one where the draft model's own context ends.

        A long prompt is read piece by piece, one a round; until it is read, its drafts are empty.
        """
        readers = [self._readers.get(request.sequence) for request in requests]
        piece = max(self._max_num_batched_tokens // max(len(requests), 1), 2)
        both = zip(readers, requests, strict=True)
        active = [reader for reader, request in both if reader is not None and reader.begin(request)]
        while active:
            self._read(active, piece)
            active = [reader for reader in active if reader.wants_more]
        return [NO_DRAFT if reader is None else reader.draft for reader in readers]

    def guess(
        self, request: DraftRequest, draft: Draft, chance: Callable[[float], float], next_chance: float
    ) -> Guess | None:
        """What is likeliest to become of a draft of this model's, of all that it could draft ahead for.

        chance: how likely a token is to be kept, by its confidence. next_chance: how likely the token that the model
        expects behind a draft is to follow.
        """
        reader = self._readers.get(request.sequence)
        return reader.guess(draft, chance, next_chance) if reader else None

    def draft_ahead(
        self,
        requests: Seq[DraftRequest],
        drafts: Seq[Draft],
        check: Pending,
        guesses: Seq[Guess | None] | None = None,
        max_calls: int | None = None,
    ) -> None:
        """Draft for the next round while the main model checks this one's drafts, until that is done.

        As if what is guessed had come true; by default what seems likeliest: that all of a draft is kept, and followed
        by the token that the draft model expects there, or that one of its tokens is not, and the next best takes its
        place (Liu et al. 2024, "PEARL: parallel speculative decoding with adaptive draft length"; McDanel 2024,
        "AMUSD: asynchronous multi-device speculative decoding"). Where it comes out otherwise, the time is lost and
        nothing else.
        """
        if check.done:
            return
        began = self.backend.seconds
        active = []
        for i, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            reader = self._readers.get(request.sequence)
            guess = guesses[i] if guesses else reader.guess(draft) if reader else None
            if reader and guess:
                reader.begin_ahead(draft, guess)
                active.append(reader)
        num_calls = 0
        while active and not (num_calls and check.done) and num_calls != max_calls:
            self._read(active, 1)
            num_calls += 1
            active = [reader for reader in active if reader.goes_on_ahead()]
        self.ahead_seconds += self.backend.seconds - began

    def _read(self, readers: Seq[Reader], piece: int) -> None:
        """Have up to `piece` tokens of each sequence read, and the next one chosen where those were all."""
        chunks = [Chunk(r.slot, r.unread[:piece], num_rows=int(len(r.unread) <= piece)) for r in readers]
        step = self.backend.submit(chunks).wait()
        rows = iter(range(len(readers)))
        for reader, chunk in zip(readers, chunks, strict=True):
            if chunk.num_rows:
                row = step.row(next(rows))
                reader.choose(self._subset.row(row) if self._subset else row)

    @property
    def is_priced(self) -> bool:
        """Whether what the model's calls cost is known."""
        return self.cost is not None

    def seconds_for(self, num_tokens: Seq[int], context: float, before: int | None = None) -> float:
        """Seconds of one call that reads so many tokens of each of several sequences, of `context` tokens on average.

        before: rows of the call before, if they matter.
        """
        return self.cost.together(num_tokens, context, before) if self.cost else 0.0

    def follow(self, expected: float, seconds: float) -> None:
        """Adapt what calls cost to some that should have taken `expected` seconds, and took `seconds`."""
        if self.cost:
            self.cost.follow(expected, seconds)

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether the model has a place for the sequence, with room for as long a draft."""
        reader = self._readers.get(request.sequence)
        return reader is not None and reader.has_room(request)

    def num_ahead(self, sequence: Sequence) -> int:
        """Tokens of the next draft that are there already."""
        reader = self._readers.get(sequence)
        return reader.num_ahead(sequence) if reader else 0

    def num_unread(self, sequence: Sequence) -> int:
        """Committed tokens that are to be read before the next draft; 0 where none can follow."""
        reader = self._readers.get(sequence)
        return max(len(sequence) - reader.slot.length, 0) if reader else 0

    def observe(self, sequence: Sequence, committed: Committed) -> None:
        """Keep the cache up to the last accepted token."""
        if reader := self._readers.get(sequence):
            reader.observe(sequence, committed)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence and give its cache back."""
        if reader := self._readers.pop(sequence, None):
            try:
                if self._reuse:
                    reader.slot.keep(reader.context(sequence))
            finally:
                reader.slot.close()
