"""One answer's part of a round's call: the tokens that the main model reads, their rows, and what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.decoding.answer import Answer
from outrider.decoding.observer import Observer
from outrider.errors import NoTokenLeft
from outrider.tokens.sampling import DraftRows
from outrider.types import NO_DRAFT, Chunk, Committed, Draft, Drafter, Outcome, Step, Turn


@dataclass(slots=True)
class Reading:
    """Committed tokens that are not in the cache yet; after the newest one, the draft.

    chunk: these tokens, with rows from the newest committed token on; a prompt's piece before its end has none. begin:
    the position of the first.
    """

    answer: Answer
    turn: Turn | None
    chunk: Chunk
    begin: int
    is_prompt: bool = False  # nothing is decoded yet, or only for the prompt's rows

    @classmethod
    def of(cls, answer: Answer, turn: Turn | None, num_tokens: int) -> Reading:
        """num_tokens: most committed tokens to read."""
        begin, sequence = answer.slot.length, answer.sequence
        token_ids, generated = sequence.next_piece(begin, num_tokens)
        num_rows, parents = 0, None
        if begin + len(token_ids) == len(sequence):
            draft = draft_of(turn)
            num_rows, parents, token_ids = len(draft) + 1, draft.parents, token_ids + draft.token_ids
        chunk = Chunk(answer.slot, token_ids, num_rows, answer.features, parents, generated)
        return cls(answer, turn, chunk, begin, not answer.decodes or answer.request.waits)

    @property
    def draft(self) -> Draft:
        """The draft that is verified."""
        return draft_of(self.turn)

    def commit(self, target: Step, observer: Observer | None, *, beside_prompts: bool) -> None:
        """Verify the draft, commit what the answer gets, drop the rest from the cache, and tell the drafters."""
        answer = self.answer
        path = self._verify(target, observer) if self.chunk.num_rows else []
        if not self.chunk.num_rows:
            answer.note_progress()
        if (policy := answer.request.policy) is not None:
            committed = self._committed(target, path, beside_prompts=beside_prompts)
            for drafter in policy.drafters:
                drafter.observe(answer.sequence, _for(answer, drafter, committed))
            policy.observe(answer.sequence, committed)
        if observer is not None:
            observer.committed(answer)

    def _verify(self, target: Step, observer: Observer | None) -> list[int]:
        """Verify the draft, and commit. Returns the accepted path."""
        answer, draft = self.answer, self.draft
        rows = DraftRows(target.rows(self.chunk).__getitem__, answer.sampler, draft)
        outcome = verify(answer, draft, rows)
        if observer is not None:
            observer.verified(answer, draft, outcome)
        answer.commit(rows, outcome, self.turn.author if self.turn else None)
        if draft.parents is not None:
            answer.slot.keep(outcome.path)
        answer.slot.trim(len(answer.sequence) - 1)  # drops the rejected tokens
        return outcome.path

    def _committed(self, target: Step, path: Sequence[int], *, beside_prompts: bool) -> Committed:
        """What drafters are told: the tokens that stay in the cache, with their hidden states."""
        read, features = self.answer.sequence.token_ids[self.begin : self.answer.slot.length], None
        if self.chunk.features:
            features = target.features(self.chunk)[[*self.chunk.layout.kept(path)[: len(read)]]]
        return Committed(read, [*path], features, beside_prompts)


def draft_of(turn: Turn | None) -> Draft:
    """A turn's draft; none without a turn."""
    return NO_DRAFT if turn is None else turn.draft


def verify(answer: Answer, draft: Draft, rows: DraftRows) -> Outcome:
    """Verify an answer's draft with the target pass's rows.

    If the options leave no token at a row, the draft is cut there, and only the tokens before it are verified. If
    all of them are accepted, they may end the answer, as in plain decoding. If they do not end it, the next round
    fails, as plain decoding does.

    A tree needs no second try: its rows are read after accepted tokens only, so the token before such a row was
    accepted, and all before it. Nor may it have one, as fewer tokens would be judged with other random numbers.
    """
    request, position = answer.request, len(answer.sequence)
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
    except NoTokenLeft:  # at the row after the last token, which is read if all are accepted
        return Outcome.of_chain(len(draft) - 1, draft.token_ids[-1])


def _for(answer: Answer, drafter: Drafter, committed: Committed) -> Committed:
    """What a round has committed, with the hidden states that a drafter wants."""
    wanted = drafter.requirements.features
    if committed.features is None or wanted == answer.features:
        return committed
    if not wanted:
        return replace(committed, features=None)
    parts = dict(zip(answer.features, np.split(committed.features, len(answer.features), axis=1), strict=True))
    return replace(committed, features=np.concatenate([parts[name] for name in wanted], axis=1))
