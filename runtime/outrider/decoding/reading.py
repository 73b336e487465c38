"""One request's part of a round's call: the tokens that the main model reads, its rows, and what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from outrider.decoding.observer import Observer
from outrider.decoding.request import Request
from outrider.errors import NoTokenLeft
from outrider.tokens.sampling import DraftRows
from outrider.types import NO_DRAFT, Chunk, Committed, Draft, Drafter, Outcome, Step, Turn


@dataclass(slots=True)
class Reading:
    """Committed tokens that are not in the cache yet; behind the newest one, the draft.

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
            draft = draft_of(turn)
            num_rows, parents = len(draft) + 1, draft.parents_behind(len(token_ids))
            token_ids = token_ids + draft.token_ids
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
        outcome = verify(request, draft, rows)
        if observer is not None:
            observer.verified(request, draft, outcome)
        request.commit(rows, outcome, self.turn.author if self.turn else None)
        if self.chunk.parents is not None:
            request.slot.keep(self._kept(outcome.path))
        request.slot.trim(len(request.sequence) - 1)  # drops the rejected tokens
        return outcome.path

    def committed(self, target: Step, path: Seq[int], *, beside_prompts: bool) -> Committed:
        """What drafters are told: the tokens that stay in the cache, with their hidden states."""
        read = self.request.sequence.token_ids[self.begin : self.request.slot.length]
        features = target.features(self.chunk)[self._kept(path)[: len(read)]] if self.chunk.features else None
        return Committed(read, [*path], features, beside_prompts)

    def _kept(self, path: Seq[int]) -> list[int]:
        """The indices of the committed tokens and of those on the path. Of a chain's, only the first may stay."""
        if self.chunk.parents is None:
            return [*range(len(self.chunk.token_ids))]
        num_committed = len(self.chunk.token_ids) - self.chunk.num_rows + 1
        return [*range(num_committed), *(num_committed + i for i in path)]


def draft_of(turn: Turn | None) -> Draft:
    """A turn's draft; none without a turn."""
    return NO_DRAFT if turn is None else turn.draft


def verify(request: Request, draft: Draft, rows: DraftRows) -> Outcome:
    """Verify a request's draft with the target pass's rows.

    If the options leave no token at a row, the draft is cut there, and only the tokens before it are verified. If
    all of them are accepted, they may end the answer, as in plain decoding. If they do not end it, the next round
    fails, as plain decoding does.

    A tree needs no second try: its rows are read behind accepted tokens only, so the token before such a row was
    accepted, and all before it. Nor may it have one, as fewer tokens would be judged with other random numbers.
    """
    position = len(request.sequence)
    try:
        return request.verifier.verify(draft, rows, request.noise, position)
    except NoTokenLeft as error:
        if not error.row:
            raise
        if draft.parents is not None:
            *path, last = draft.path_to(error.row - 1)
            return Outcome(path, draft.token_ids[last])
        draft = draft.cut(error.row)
    try:
        return request.verifier.verify(draft, rows, request.noise, position)
    except NoTokenLeft:  # at the row behind the last token, which is read if all are accepted
        return Outcome.of_chain(len(draft) - 1, draft.token_ids[-1])


def observe(request: Request, committed: Committed) -> None:
    """Tell a request's drafters, then the policy, what a round has committed.

    Each drafter gets the hidden states that it wants.
    """
    policy, sequence = request.policy, request.sequence
    if policy is not None:
        for drafter in policy.drafters:
            drafter.observe(sequence, _for(request, drafter, committed))
        policy.observe(sequence, committed)


def _for(request: Request, drafter: Drafter, committed: Committed) -> Committed:
    """What a round has committed, with the hidden states that a drafter wants."""
    wanted = drafter.requirements.features
    if committed.features is None or wanted == request.features:
        return committed
    if not wanted:
        return replace(committed, features=None)
    parts = dict(zip(request.features, np.split(committed.features, len(request.features), axis=1), strict=True))
    return replace(committed, features=np.concatenate([parts[name] for name in wanted], axis=1))
