"""Temperature, top-k, top-p, min-p and typical-p, computed on the few tokens that can be kept."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.types import Distribution, Logits

SMALLEST = np.finfo(np.float32).smallest_subnormal
_PART = 64


def truncated_softmax(
    logits: Logits, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float = 1.0
) -> Distribution:
    """The truncated distribution of float32 logits [vocab_size].

    - top-k keeps every token whose logit is at least the k-th largest (so more than k when they tie).
    - top-p keeps the likeliest tokens until their mass, after top-k, reaches p; the lower id first among equals.
    - min-p keeps tokens of at least min_p times the highest probability.
    - typical-p keeps the tokens whose −log(probability) is nearest to the entropy, until their mass, after min-p,
      reaches p (and all that are as near as the last one).

    At least one token is always left. The result is exact: candidates are dropped early only if they provably cannot be
    kept, so that a vocabulary of 150,000 takes one pass and no sort.
    """
    if 0 < top_k < len(logits):
        token_ids = k_largest(logits, top_k)
        logits = logits[token_ids]
    else:
        token_ids = None
    # Subtract the maximum first, so that exp stays in range at any temperature.
    weights = np.exp((logits - logits.max()) * np.float32(1 / temperature))
    if top_p < 1:
        # Tokens below this weight have less mass in all than 1 - p, so top-p drops each of them. The factor allows for
        # rounding; a candidate too many costs nothing.
        total = weights.sum(dtype=np.float64)
        weights, token_ids = _keep(weights, token_ids, weights > 0.999 * (1 - top_p) * total / len(weights))
        order = np.lexsort((token_ids, -weights))
        mass = np.cumsum(weights[order], dtype=np.float64)
        num_kept = int(np.searchsorted(mass, top_p * total)) + 1
        kept = np.sort(order[:num_kept])  # token_ids ascend, so positions in order keep them ascending
        weights, token_ids = weights[kept], token_ids[kept]
    # The highest weight is 1. Without min-p, drop weights that underflowed to 0: they have no logarithm.
    weights, token_ids = _keep(weights, token_ids, weights >= max(np.float32(min_p), SMALLEST))
    probs = weights.astype(np.float64)
    probs /= probs.sum()
    if typical_p < 1:
        typical = _typical(probs, typical_p)
        token_ids, probs = token_ids[typical], probs[typical]
        probs /= probs.sum()
    return Distribution(token_ids, probs)


def k_largest(logits: NDArray[np.floating[Any]], k: int) -> NDArray[np.int64]:
    """The indices, ascending, of the k highest logits, and of those equal to the last of them.

    The k-th highest of the maxima of disjoint parts is no higher than the k-th highest of all. So lower logits are
    dropped before sorting: at a vocabulary of 150,000 in 0.06 ms, where a partition of all takes 0.9.
    """
    indices, num_parts = None, len(logits) // _PART
    if k <= num_parts // 2:
        highest = logits[: _PART * num_parts].reshape(_PART, num_parts).max(axis=0)
        indices = np.flatnonzero(logits >= _kth(highest, k))
        logits = logits[indices]
    kept = np.flatnonzero(logits >= _kth(logits, k))
    return kept if indices is None else indices[kept]


def ranked(logits: NDArray[np.floating[Any]], k: int) -> NDArray[np.int64]:
    """The indices of the k highest logits, in descending order, the lower index first among equals; none of −inf."""
    kept = k_largest(logits, min(k, len(logits)))
    kept = kept[logits[kept] > -np.inf]
    return kept[np.argsort(-logits[kept], kind="stable")][:k]


def _kth(values: NDArray[np.floating[Any]], k: int) -> np.floating[Any]:
    """The k-th highest."""
    highest: np.floating[Any] = np.partition(values, len(values) - k)[len(values) - k]
    return highest


def _typical(probs: NDArray[np.float64], typical_p: float) -> NDArray[np.int64]:
    """The indices, ascending, that typical-p keeps of float64 [n] (Meister et al. 2022, section 3)."""
    logs = np.log(probs)
    entropy = -float((probs * logs).sum())
    # As with top-p: drop these before sorting. They have less mass in all than 1 − p, and are farther from the entropy
    # than all others, because tokens that are likelier than the entropy suggests are at most the entropy away from it.
    indices = np.flatnonzero(logs > min(np.log(0.999 * (1 - typical_p) / len(probs)), -2 * entropy - 1e-6))
    distances = np.abs(-logs[indices] - entropy)
    order = distances.argsort()
    mass = np.cumsum(probs[indices[order]])
    last = order[min(int(np.searchsorted(mass, typical_p)), len(order) - 1)]
    kept: NDArray[np.int64] = indices[distances <= distances[last]]
    return kept


def _keep(
    weights: np.ndarray[tuple[int], np.dtype[np.float32]],
    token_ids: np.ndarray[tuple[int], np.dtype[np.int64]] | None,
    mask: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float32]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    kept = np.flatnonzero(mask)
    return weights[kept], kept if token_ids is None else token_ids[kept]
