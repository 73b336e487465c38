"""What of a draft a round uses. Drafts of apps' drafters are checked here, where they enter it."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np

from outrider.decoding.answer import Answer, isolated
from outrider.decoding.own import inner
from outrider.errors import DrafterError
from outrider.system.guard import Guard
from outrider.types import NO_DRAFT, Distribution, Draft, Drafter, Turn

_ROUNDING = 1e-6  # of probabilities, which may have been float32
_INT = {int}


def usable(draft: Draft, answer: Answer, turn: Turn, author: Drafter | None, vocab_size: int) -> Draft:
    """The draft as far as a round uses it. One that breaks a rule ends its answer alone. author: made it."""
    if draft is NO_DRAFT:
        return NO_DRAFT
    with isolated(answer):
        if author is not None and inner(author) is not author:  # an app's, which may propose anything
            draft = sound(draft, vocab_size, answer.request.name_of(author))
        draft = _within(draft, turn.request.limit, vocab_size)
        draft = _allowed(draft, answer, goes_on=turn.drafter is None or (author is not None and author.is_free))
        return _readable(draft, answer)
    return NO_DRAFT


def _readable(draft: Draft, answer: Answer) -> Draft:
    """The draft, with room for its branches in the cache; its first candidates if there is too little.

    That depends on the number of candidates, not on which they are, so that it does not bias rejection sampling.
    """
    if draft.parents is None:
        return draft
    branches = draft.branches
    count, length = len(branches) - 1, max(map(len, branches)) + 1
    return draft if count > 0 and answer.slot.fork(count, length) == count else draft.first_chain


def _within(draft: Draft, limit: int, vocab_size: int) -> Draft:
    """The draft, cut to `limit` tokens and before any unknown id: these would be read beyond the device's arrays."""
    known = next((i for i, token_id in enumerate(draft.token_ids) if not 0 <= token_id < vocab_size), limit)
    return draft if len(draft) <= min(known, limit) else draft.cut(min(known, limit))


def _allowed(draft: Draft, answer: Answer, *, goes_on: bool) -> Draft:
    """The draft, cut before the first token that the answer's grammar does not allow.

    Sampled tokens stay: to drop one after seeing it would bias the output. Those of a draft model are allowed anyway.
    goes_on: add the tokens that the grammar forces after the others. A draft model's record and price are for its own.
    """
    grammar = answer.grammar
    if grammar is None or not len(draft) or draft.probs is not None or draft.parents is not None:
        return draft
    draft = draft.cut(grammar.num_allowed(draft.token_ids))
    forced = grammar.forced(draft.token_ids, answer.limit - len(draft)) if goes_on else []
    if not forced:
        return draft
    confidences = None if draft.confidences is None else [*draft.confidences, *(1.0 for _ in forced)]
    return replace(draft, token_ids=[*draft.token_ids, *forced], confidences=confidences)


def sound(draft: Any, vocab_size: int, name: str) -> Draft:
    """A copy of a draft, with lists of its own, which its drafter cannot change any more. name: the drafter's.

    Raises:
        DrafterError: for one that breaks a rule.
    """
    with Guard("A draft", DrafterError, "Propose an outrider.types.Draft."):
        if fault := _fault_of(draft, vocab_size):
            raise DrafterError(f"The drafter {name!r} proposed {fault}")
    confidences, parents = draft.confidences, draft.parents
    return Draft(
        [*draft.token_ids],
        None if draft.probs is None else [*draft.probs],
        None if confidences is None else [*confidences],
        None if parents is None else [*parents],
    )


def _fault_of(draft: Any, vocab_size: int) -> str:
    """The value that breaks a rule of drafts, and the rule, after "The drafter proposed"; empty for a sound draft.

    Too many tokens are no fault: they are cut off later. Nor are ids that the main model, with `vocab_size`, does not
    have, unless they were sampled: to drop one after seeing it would bias the output.
    """
    if not isinstance(draft, Draft):
        return f"{_shown(draft)} instead of a Draft. Propose one for each request; Draft([]) is an empty one."
    token_ids, parents = draft.token_ids, draft.parents
    if not _are_integers(token_ids):
        return f"token_ids={_shown(token_ids)}, which is no list of integers. Convert it; an array has tolist()."
    count = len(token_ids)
    if parents is not None and not (
        _are_integers(parents) and len(parents) == count and all(-1 <= parent < i for i, parent in enumerate(parents))
    ):
        return (
            f"parents={_shown(parents)} for {count} tokens, which is no tree. Give a list with the index of an earlier "
            "token for each, or −1 for the newest committed token."
        )
    confidences, probs = draft.confidences, draft.probs
    if confidences is not None and not (_is_list(confidences, count) and all(map(_is_probability, confidences))):
        return f"confidences={_shown(confidences)} for {count} tokens. Give a list of as many numbers from 0 to 1."
    if probs is None:
        return ""
    if not _is_list(probs, count):
        return f"probs={_shown(probs)} for {count} tokens. Give a list of as many Distributions, or None."
    if unknown := [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]:
        return (
            f"token_ids={_shown(token_ids)} with probs, and the main model has no token {unknown[0]}: its ids end at "
            f"{vocab_size - 1}. A sampled token is never cut off. Give unknown tokens no chance before drawing."
        )
    found = (_fault_of_probs(each, token_id) for each, token_id in zip(probs, token_ids, strict=True))
    return next((f"probs[{i}]={_shown(probs[i])}, which {fault}" for i, fault in enumerate(found) if fault), "")


def _shown(value: object) -> str:
    return f"{repr(value)[:80]} (a {type(value).__name__})"


def _are_integers(values: Any) -> bool:
    """Whether this is a list of Python's integers. NumPy's would be added where lists are to be joined."""
    return type(values) is list and {*map(type, values)} <= _INT


def _is_list(values: Any, count: int) -> bool:
    return type(values) is list and len(values) == count


def _is_probability(value: Any) -> bool:
    return isinstance(value, Real) and -_ROUNDING <= float(value) <= 1 + _ROUNDING  # NaN is not


def _fault_of_probs(drafted: Any, token_id: int) -> str:
    """What is wrong with the distribution that a token was drawn from."""
    if not isinstance(drafted, Distribution):
        return "is no Distribution. Make one of the ids and their probabilities."
    ids, probs = drafted.token_ids, drafted.probs
    arrays = isinstance(ids, np.ndarray) and isinstance(probs, np.ndarray)
    if not arrays or ids.ndim != 1 or ids.shape != probs.shape or ids.dtype.kind != "i" or probs.dtype.kind != "f":
        return "has no arrays of equal length: int64 token_ids and float64 probs."
    if not abs(probs.sum() - 1) <= _ROUNDING or not probs.min() >= 0:  # NaN is neither
        return "does not sum to 1, with none below 0. Normalise it."
    if (ids[1:] <= ids[:-1]).any():
        return "has token_ids that do not ascend. Sort them, each once."
    return "" if drafted.prob(token_id) > 0 else f"gives its token {token_id} no chance. Draw the token from it."
