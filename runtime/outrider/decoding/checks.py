"""Checks the drafts of apps' drafters where they enter a round."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from outrider.errors import DrafterError
from outrider.system.guard import Guard
from outrider.types import Distribution, Draft

_ROUNDING = 1e-6  # of probabilities, which may have been float32
_INT = {int}


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
    if parents is not None and not (_are_integers(parents) and len(parents) == count and _are_tree(parents)):
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


def _are_tree(parents: Sequence[int]) -> bool:
    return all(-1 <= parent < i for i, parent in enumerate(parents))


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
