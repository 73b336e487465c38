"""Drafts an ended answer again, so that a model without records gets some at no answer's cost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.drafters.controller.rules import ConfidenceThreshold
from outrider.types import Committed, num_common_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outrider.drafters.controller.records import ModelRecord
    from outrider.types import Drafter, DraftRequest

ENOUGH_TOKENS = 100.0  # of a record: from then on nothing is drafted again
_LIMIT_TOKENS = 4  # tokens of a draft
_WHOLE = ConfidenceThreshold(0.0)  # no draft ends early, and confidences are noted


def replay(
    model: Drafter, record: ModelRecord, request: DraftRequest, is_cancelled: Callable[[], bool]
) -> Iterator[None]:
    """Draft the answer of an ended request in a slot of its own, and note in the record which tokens are as they were.

    Yields after each draft, and after each piece of the prompt. At most one call begins once `is_cancelled` says so.
    What was read is published in the model's prefix cache, as after an answer.
    """
    told = request.sequence
    sequence = replace(told, token_ids=told.token_ids[: told.num_prompt_tokens + 1])
    if not model.reserve(sequence, len(told) + _LIMIT_TOKENS, 0):
        return
    try:
        while record.share.weight < ENOUGH_TOKENS and (left := len(told) - len(sequence)) > 0:
            asked = replace(
                request,
                sequence=sequence,
                limit=min(_LIMIT_TOKENS, left),
                num_left=left,
                rule=_WHOLE,
                ahead=False,
                trees=False,
                together=2,  # as if others waited: prompts are read in short pieces
                is_cancelled=is_cancelled,
            )
            unread = model.num_unread(sequence)
            if not model.can_draft(asked):
                return
            (draft,) = model.propose([asked])
            if draft.token_ids:
                after = told.token_ids[len(sequence) :]
                path = [*range(num_common_tokens(draft.token_ids, after))]
                record.observe(draft, path)
                begin, committed = len(sequence), after[: len(path) + 1]
                sequence.token_ids.extend(committed)
                model.observe(sequence, Committed(told.token_ids[begin - 1 : len(sequence) - 1], path))
            elif model.num_unread(sequence) >= unread:
                return
            yield
    finally:
        model.release(sequence)
