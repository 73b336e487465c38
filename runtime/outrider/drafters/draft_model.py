"""Drafts from a smaller model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.drafters.vocabulary import Vocabulary
from outrider.types import Chunk, Draft

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.drafters.reader import Reader
    from outrider.drafters.vocabulary import Subset
    from outrider.types import Backend, DraftRequest, Sequence


class DraftModel:
    """A smaller model, decoding ahead.

    Tokens are chosen as the request's verifier wants them, through the same processors as the main model's, so that
    draft_probs come as close to target_probs as they can (Leviathan et al. 2022, section 2). Several sequences are
    drafted in one call, token by token.

    context_length: tokens that the model reads at most. vocabulary: how its tokens and the main model's become one
    another; by default they are the same. subset: the tokens that it has logits for; by default all.
    """

    num_assistant_tokens = 3

    def __init__(
        self,
        backend: Backend,
        *,
        context_length: int,
        max_num_batched_tokens: int = 512,
        vocabulary: Vocabulary | None = None,
        subset: Subset | None = None,
    ) -> None:
        self.backend = backend
        self._context_length = context_length
        self._max_num_batched_tokens = max_num_batched_tokens
        self._vocabulary = vocabulary or Vocabulary()
        self._subset = subset
        self._readers: dict[Sequence, Reader] = {}

    @property
    def seconds(self) -> float:
        """Time spent in the draft model's calls so far."""
        return self.backend.seconds

    def reserve(self, sequence: Sequence, max_tokens: int) -> bool:
        """Take room in the cache for a sequence that may grow to `max_tokens`; False while there is none."""
        room = min(self._vocabulary.room(max_tokens), self._context_length)
        if (slot := self.backend.open(room)) is None:
            return False
        self._readers[sequence] = self._vocabulary.reader(slot, room)
        return True

    def propose(self, requests: Seq[DraftRequest]) -> list[Draft]:
        """A draft of `limit` tokens for each request, an empty one where the draft model's own context ends.

        A long prompt is read piece by piece, one a round; until it is read, its drafts are empty.
        """
        readers = [self._readers[request.sequence] for request in requests]
        piece = max(self._max_num_batched_tokens // max(len(requests), 1), 2)
        active = [reader for reader, request in zip(readers, requests, strict=True) if reader.begin(request)]
        while active:
            chunks = [Chunk(r.slot, r.unread[:piece], num_rows=int(len(r.unread) <= piece)) for r in active]
            step = self.backend.submit(chunks).wait()
            rows = iter(range(len(active)))
            for reader, chunk in zip(active, chunks, strict=True):
                if chunk.num_rows:
                    logits = step.logits(next(rows))
                    reader.choose(self._subset.widen(logits) if self._subset else logits)
            active = [reader for reader in active if reader.wants_more]
        return [reader.draft for reader in readers]

    def num_unread(self, sequence: Sequence) -> int:
        """Committed tokens that are to be read before the next draft."""
        return max(len(sequence) - self._readers[sequence].slot.length, 0)

    def observe(self, sequence: Sequence, num_accepted: int) -> None:
        """Keep the cache up to the last accepted token."""
        if reader := self._readers.get(sequence):
            reader.observe(sequence, num_accepted)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence and give its cache back."""
        if reader := self._readers.pop(sequence, None):
            reader.slot.close()
