"""One request's part of a round's call: the tokens that the main model reads, its rows, and what is kept of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.tokens.sampling import DraftRows
from outrider.types import NO_DRAFT, Chunk, Committed

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.decoding.observer import Observer
    from outrider.decoding.request import Request
    from outrider.types import Draft, Step, Turn


@dataclass(slots=True)
class Reading:
    """Committed tokens that are not in the cache yet; behind the newest one, the draft and its mask tokens.

    chunk: these tokens, with rows from the newest committed token on; a prompt's piece before its end has none. begin:
    the position of the first. first_row: the index of its rows among those of the call.
    """

    request: Request
    turn: Turn | None
    chunk: Chunk
    begin: int
    first_row: int

    @classmethod
    def of(cls, request: Request, turn: Turn | None, num_tokens: int, first_row: int) -> Reading:
        """num_tokens: most committed tokens to read."""
        begin = request.slot.length
        token_ids, generated = request.sequence.next_piece(begin, num_tokens)
        num_rows, parents = 0, None
        if begin + len(token_ids) == len(request.sequence):
            behind = draft_of(turn).with_masks(request.mask_token_ids)
            num_rows, parents = len(behind) + 1, behind.parents_behind(len(token_ids))
            token_ids = token_ids + behind.token_ids
        chunk = Chunk(request.slot, token_ids, num_rows, request.features, parents, generated)
        return cls(request, turn, chunk, begin, first_row)

    @property
    def draft(self) -> Draft:
        """The draft that is verified."""
        return draft_of(self.turn)

    def commit(self, target: Step, observer: Observer | None) -> list[int]:
        """Verify the draft, commit what the answer gets, and drop the rest from the cache: the accepted path."""
        request, draft = self.request, self.draft
        rows = DraftRows.of(target, self.first_row, request.sampler, draft)
        outcome = request.verify(draft, rows)
        if observer is not None:
            observer.verified(request, draft, outcome)
        request.commit(rows, outcome, self.turn.author if self.turn else None)
        if self.chunk.parents is not None:
            request.slot.keep(self._kept(outcome.path))
        request.slot.trim(len(request.sequence) - 1)  # drops the rejected tokens, and masks
        return outcome.path

    def committed(self, target: Step, path: Seq[int], *, beside_prompts: bool) -> Committed:
        """What drafters are told: the tokens that stay in the cache, with their hidden states and masks."""
        read = self.request.sequence.token_ids[self.begin : self.request.slot.length]
        features = target.features(self.chunk)[self._kept(path)[: len(read)]] if self.chunk.features else None
        masks = [target.row(self.first_row + i + 1) for i in self.draft.masks_behind(path)]
        return Committed(read, [*path], features, masks, beside_prompts)

    def _kept(self, path: Seq[int]) -> list[int]:
        """The indices of the committed tokens and of those on the path. Of a chain's, only the first may stay."""
        if self.chunk.parents is None:
            return [*range(len(self.chunk.token_ids))]
        num_committed = len(self.chunk.token_ids) - self.chunk.num_rows + 1
        return [*range(num_committed), *(num_committed + i for i in path)]


def draft_of(turn: Turn | None) -> Draft:
    """A turn's draft; none without a turn."""
    return NO_DRAFT if turn is None else turn.draft
