"""Decisions from a row's largest logits, where the others provably change nothing.

A device that has found the k largest logits of a row hands over some hundred bytes instead of 600 kB. The tokens that
sampling keeps of them go through the same code as those of a whole row, so what comes out has the same bits: only
which tokens are kept is asked here. No order among equals is relied on, as devices differ in it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from outrider.sampling.truncate import SMALLEST, k_largest, truncated_softmax
from outrider.types import Distribution, LogitsRow, TopLogits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from outrider.types import Logits

# How far, at most, a device's sum of 150,000 exponentials in single precision may be off (see `add_top_logits`), and an
# exponential of NumPy's.
TOLERANCE = 1e-4


def without(row: LogitsRow, token_id: int) -> LogitsRow:
    """The row as if that token had a logit of −inf."""

    def full() -> Logits:
        logits = row.full().copy()
        logits[token_id] = -np.inf
        return logits

    top = row.top
    listed = None if top is None else top.token_ids != token_id
    if top is None or listed is None or listed.sum() in (0, len(listed)):
        return LogitsRow(full)
    with np.errstate(all="ignore"):  # where it is all of the row, nothing finite is left
        rest = top.logsumexp + np.log1p(-np.exp(top.logits[~listed][0] - top.logsumexp))
    return LogitsRow(
        full, replace(top, token_ids=top.token_ids[listed], logits=top.logits[listed], logsumexp=float(rest))
    )


def argmax(row: LogitsRow) -> int:
    """The token with the highest logit, as it is; the lowest id among equals."""
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
    """All the logits that a row has besides −inf, as its largest: nothing is left that could change a decision.

    token_ids: int64 [n], ascending. logits: float32 [n].
    """
    with np.errstate(invalid="ignore"):  # what is not finite makes a sum that is not
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
    """What `truncated_softmax` says of the whole row, or None where the listed tokens do not tell.

    logits: float32 [k], those of the listed tokens after all processors, which have only lowered them and others.
    """
    kept: NDArray[np.int64] | slice | None
    if 0 < top_k < top.vocab_size:
        kept, top_k = _k_largest(top, logits, top_k), 0
    elif top_p < 1:
        kept, top_p = _nucleus(top, logits, temperature, top_p), 1.0
    else:
        # Weights are rounded to single precision, so what is half a step below the least that is kept may be kept.
        least = float(max(np.float32(min_p), SMALLEST)) - 0.75 * float(SMALLEST)
        kept = None if _weight_of_others(top, logits, temperature) >= least else slice(None)
    if kept is None:
        return None
    made = truncated_softmax(logits[kept], temperature, top_k, top_p, min_p, typical_p)
    return Distribution(top.token_ids[kept][made.token_ids], made.probs)


def _k_largest(top: TopLogits, logits: Logits, k: int) -> NDArray[np.int64] | None:
    """The places of the k highest logits, and of what equals the last of them."""
    if k > len(logits):
        return None
    kept = k_largest(logits, k)
    return kept if logits[kept].min() > top.bound else None


def _nucleus(top: TopLogits, logits: Logits, temperature: float, top_p: float) -> NDArray[np.int64] | None:
    """The places of the likeliest tokens until their mass reaches p; None where what is not listed may move the cut."""
    weights = np.exp((logits - logits.max()) * np.float32(1 / temperature))
    total = weights.sum(dtype=np.float64)
    others = _mass_of_others(top, logits, temperature)
    # Sums in another order round elsewhere.
    least, most = top_p * (total + others[0]) * (1 - 1e-9), top_p * (total + others[1]) * (1 + 1e-9)
    if not total > most:
        return None
    # Tokens below this weight have a joint mass under what lies behind the cut, so none of them is before it.
    candidates = np.flatnonzero(weights > 0.999 * (total - most) / len(weights))
    weights = weights[candidates]
    order = np.lexsort((candidates, -weights))  # token ids ascend as places do
    mass = np.cumsum(weights[order], dtype=np.float64)
    first, last = np.searchsorted(mass, [least, most])
    if first != last or last == len(order) or weights[order[last]] <= _weight_of_others(top, logits, temperature):
        return None
    return np.sort(candidates[order[: last + 1]])


def _weight_of_others(top: TopLogits, logits: Logits, temperature: float) -> float:
    """What the weight of a token that is not listed does not exceed, where the highest has 1."""
    return float(np.exp((top.bound - float(logits.max())) / temperature)) * (1 + TOLERANCE)


def _mass_of_others(top: TopLogits, logits: Logits, temperature: float) -> tuple[float, float]:
    """The least and the most that the weights of all tokens that are not listed can add up to.

    At temperature 1, their mass is what the listed ones leave of all; at another, it follows that each weight w becomes
    w^power: for powers above 1, w^power = w · w^(power − 1) and the largest w is known; below 1, Hölder's inequality
    says n^(1 − power) · mass^power. Where nothing else is finite, they are 0: so a row as `whole_row` has it gives the
    same tokens as all of its vocabulary, though sums over many zeros more round elsewhere.
    """
    if top.bound == -np.inf:
        return 0.0, 0.0
    with np.errstate(all="ignore"):  # what is not finite is not kept
        highest, power = float(logits.max()), 1 / temperature
        total = np.exp(top.logsumexp - highest)
        tolerance = TOLERANCE + float(np.expm1(np.spacing(np.float32(abs(top.logsumexp)))))  # it is rounded as well
        listed = np.exp(top.logits.astype(np.float64) - highest).sum()
        most = max(total * (1 + tolerance) - listed, 0.0)
        if power >= 1:
            largest = min(np.exp(top.bound - highest), 1.0)
            bound = most * largest ** (power - 1)
        else:
            bound = (top.vocab_size - len(logits)) ** (1 - power) * most**power
        exact = temperature == 1 and logits is top.logits
        return (max(total * (1 - tolerance) - listed, 0.0) if exact else 0.0), float(bound)
