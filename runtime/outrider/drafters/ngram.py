"""Drafts copied from the context."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.types import NO_DRAFT, Copier, Draft, DraftRequest, TokenSequence


class Ngram(Copier):
    """Prompt lookup: if the last n tokens occurred in the context before, propose the tokens that followed them.

    Uses the longest n up to `max_ngram_size` that has a match, and its latest occurrence. A copy that reaches the end
    of the context continues with its own beginning, so that repetition is drafted at full length. No model is called.

    Source: Saxena 2023, "Prompt Lookup Decoding" (which takes the earliest occurrence); Transformers'
    `PromptLookupCandidateGenerator`. The context is indexed once, not scanned every round.
    """

    name = "ngram"
    num_assistant_tokens = 5

    def __init__(self, max_ngram_size: int = 3) -> None:
        self.max_ngram_size = max_ngram_size
        self._indexes: dict[TokenSequence, _Index] = {}

    def reserve(self, sequence: TokenSequence, max_tokens: int, num_cached: int = 0) -> bool:  # noqa: ARG002
        """Start an index. There is always room for one."""
        self._indexes[sequence] = _Index(self.max_ngram_size)
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each request; empty without a match."""
        return [self._propose_one(request) for request in requests]

    def release(self, sequence: TokenSequence) -> None:
        """Drop a sequence's index."""
        self._indexes.pop(sequence, None)

    def _propose_one(self, request: DraftRequest) -> Draft:
        token_ids = request.sequence.context
        source = self._indexes[request.sequence].find(token_ids)
        if source is None:
            return NO_DRAFT
        period = len(token_ids) - source
        copied: list[int] = []
        while len(copied) < request.limit and not (copied and copied[-1] in request.eos_token_ids):
            copied.append(token_ids[source + len(copied) % period])
        return Draft(copied)


class _Index:
    """Maps every n-gram of a growing context to the position after its latest occurrence."""

    def __init__(self, max_ngram_size: int) -> None:
        self._max_ngram_size = max_ngram_size
        self._next: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def find(self, token_ids: list[int]) -> int | None:
        """The position after the latest earlier occurrence of the context's last n tokens, for the longest such n."""
        # The n-grams at the very end have no next token yet: they are looked up, not indexed.
        for end in range(max(1, self._num_indexed), len(token_ids)):
            for n in range(1, min(self._max_ngram_size, end) + 1):
                self._next[tuple(token_ids[end - n : end])] = end
        self._num_indexed = len(token_ids)
        for n in range(min(self._max_ngram_size, len(token_ids)), 0, -1):
            if (found := self._next.get(tuple(token_ids[len(token_ids) - n :]))) is not None:
                return found
        return None
