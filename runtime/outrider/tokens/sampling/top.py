"""Decisions from a row's largest logits, if the others provably do not matter.

A device that picks out the k largest logits of a row transfers some hundred bytes instead of 600 kB. This module only
decides which tokens truncation keeps. They then go through the same code as those of a whole row, so the result has the
same bits. It does not rely on the order of equal logits, in which devices differ.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from outrider.tokens.sampling.truncate import SMALLEST, k_largest, truncated_softmax
from outrider.types import Distribution, Logits, LogitsRow, TopLogits

# Largest relative error of a device's sum of 150,000 exponentials in single precision (see `add_top_logits`), and of
# NumPy's exponentials.
TOLERANCE = 1e-4


def without(row: LogitsRow, token_id: int) -> LogitsRow:
    """The row with a logit of −inf for one token."""

    def full() -> Logits:
        logits = row.full().copy()
        logits[token_id] = -np.inf
        return logits

    top = row.top
    listed = None if top is None else top.token_ids != token_id
    if top is None or listed is None or listed.sum() in (0, len(listed)):
        return LogitsRow(full)
    with np.errstate(all="ignore"):  # nothing finite may be left
        rest = top.logsumexp + np.log1p(-np.exp(top.logits[~listed][0] - top.logsumexp))
    return LogitsRow(
        full, replace(top, token_ids=top.token_ids[listed], logits=top.logits[listed], logsumexp=float(rest))
    )


def argmax(row: LogitsRow) -> int:
    """The token with the highest unprocessed logit; the lowest id among equals."""
    top = row.top
    if top is not None and np.isfinite(top.logsumexp) and top.logits.max() > top.bound:
        return int(top.token_ids[top.logits.argmax()])
    return int(row.full().argmax())


def probability(row: LogitsRow, token_id: int) -> float:
    """The softmax of the row at one token, in single precision."""
    if row.top is not None and np.isfinite(row.top.logsumexp):
        listed = row.top.logits[row.top.token_ids == token_id]
        if len(listed):
            return float(np.exp(listed[0] - row.top.logsumexp))
    logits = row.full()
    total = np.exp(logits - logits.max()).sum()
    return float(np.exp(logits[token_id] - logits.max()) / total)


def whole_row(token_ids: NDArray[np.int64], logits: Logits, vocab_size: int) -> TopLogits:
    """A `TopLogits` with all logits of a row except −inf, so that every decision can be made from it.

    token_ids: int64 [n], ascending. logits: float32 [n].
    """
    with np.errstate(invalid="ignore"):  # a sum with infinite terms is not finite
        highest = logits.max()
        logsumexp = float(highest + np.log(np.exp(logits - highest).sum()))
    return TopLogits(token_ids, logits, -np.inf, logsumexp, vocab_size)


def truncated_softmax_of_top(
    top: TopLogits,
    logits: Logits,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
) -> Distribution | None:
    """`truncated_softmax` of the whole row; None if the listed tokens are not enough to decide.

    logits: float32 [k], the listed tokens' logits after all processors, which lower logits and never raise them.
    """
    kept: NDArray[np.int64] | slice | None
    if 0 < top_k < top.vocab_size:
        kept, top_k = _k_largest(top, logits, top_k), 0
    elif top_p < 1:
        kept, top_p = _nucleus(top, logits, temperature, top_p), 1.0
    else:
        # Weights are rounded to single precision, so a weight half a step below the bound may be kept.
        least = float(max(np.float32(min_p), SMALLEST)) - 0.75 * float(SMALLEST)
        kept = None if _weight_of_others(top, logits, temperature) >= least else slice(None)
    if kept is None:
        return None
    made = truncated_softmax(logits[kept], temperature, top_k, top_p, min_p, typical_p)
    return Distribution(top.token_ids[kept][made.token_ids], made.probs)


def _k_largest(top: TopLogits, logits: Logits, k: int) -> NDArray[np.int64] | None:
    """The indices of the k highest logits, and of those equal to the last of them."""
    if k > len(logits):
        return None
    kept = k_largest(logits, k)
    return kept if logits[kept].min() > top.bound else None


def _nucleus(top: TopLogits, logits: Logits, temperature: float, top_p: float) -> NDArray[np.int64] | None:
    """The indices of the likeliest tokens until their mass reaches p; None if unlisted tokens may move the cut."""
    weights = np.exp((logits - logits.max()) * np.float32(1 / temperature))
    total = weights.sum(dtype=np.float64)
    others = _mass_of_others(top, logits, temperature)
    # Sums in another order round differently.
    least, most = top_p * (total + others[0]) * (1 - 1e-9), top_p * (total + others[1]) * (1 + 1e-9)
    if not total > most:
        return None
    # Tokens below this weight have less mass in all than the part behind the cut, so none of them is before it.
    candidates = np.flatnonzero(weights > 0.999 * (total - most) / len(weights))
    weights = weights[candidates]
    order = np.lexsort((candidates, -weights))  # token ids ascend as indices do
    mass = np.cumsum(weights[order], dtype=np.float64)
    first, last = np.searchsorted(mass, [least, most])
    if first != last or last == len(order) or weights[order[last]] <= _weight_of_others(top, logits, temperature):
        return None
    return np.sort(candidates[order[: last + 1]])


def _weight_of_others(top: TopLogits, logits: Logits, temperature: float) -> float:
    """An upper bound of the weights of unlisted tokens, where the highest weight is 1."""
    return float(np.exp((top.bound - float(logits.max())) / temperature)) * (1 + TOLERANCE)


def _mass_of_others(top: TopLogits, logits: Logits, temperature: float) -> tuple[float, float]:
    """Lower and upper bound of the sum of the weights of all unlisted tokens.

    At temperature 1, their mass is the total minus the listed mass. At another temperature, each weight w becomes
    w^power. For powers above 1, w^power = w · w^(power − 1), and the largest w is known. Below 1, Hölder's inequality
    gives n^(1 − power) · mass^power. If no unlisted logit is finite, both are 0: so a row from `whole_row` gives the
    same tokens as its whole vocabulary, though sums over many more zeros round differently.
    """
    if top.bound == -np.inf:
        return 0.0, 0.0
    with np.errstate(all="ignore"):  # results that are not finite are not used
        highest, power = float(logits.max()), 1 / temperature
        total = np.exp(top.logsumexp - highest)
        tolerance = TOLERANCE + float(np.expm1(np.spacing(np.float32(abs(top.logsumexp)))))  # it is rounded, too
        listed = np.exp(top.logits.astype(np.float64) - highest).sum()
        most = max(total * (1 + tolerance) - listed, 0.0)
        if power >= 1:
            largest = min(np.exp(top.bound - highest), 1.0)
            bound = most * largest ** (power - 1)
        else:
            bound = (top.vocab_size - len(logits)) ** (1 - power) * most**power
        exact = temperature == 1 and logits is top.logits
        return (max(total * (1 - tolerance) - listed, 0.0) if exact else 0.0), float(bound)
