"""Log-probabilities of a chosen token and of the likeliest ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outrider.types import TokenLogprobs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from outrider.types import Distribution, Logits


def logprobs_of_logits(logits: Logits, token_id: int, count: int) -> TokenLogprobs:
    """From the log-softmax of float32 logits [vocab_size], in double precision. Tokens at −inf are never in `top`."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    log_total = np.log(np.exp(shifted).sum())
    top = _largest(logits, min(count, int(np.count_nonzero(logits > -np.inf))))
    return TokenLogprobs(
        token_id, float(shifted[token_id] - log_total), tuple((i, float(shifted[i] - log_total)) for i in top)
    )


def logprobs_of_distribution(distribution: Distribution, token_id: int, count: int) -> TokenLogprobs:
    """From a distribution. `top` has fewer than `count` tokens if fewer have a probability above 0."""
    logprobs = np.log(distribution.probs)
    top = _largest(distribution.probs, min(count, len(logprobs)))
    chosen = float(np.log(distribution.prob(token_id)))
    return TokenLogprobs(token_id, chosen, tuple((int(distribution.token_ids[i]), float(logprobs[i])) for i in top))


def _largest(values: NDArray[np.floating], count: int) -> list[int]:
    """The indices of the `count` largest values, the largest first; among equals the lower index first."""
    if not count:
        return []
    smallest = np.partition(values, len(values) - count)[len(values) - count]
    indices = np.flatnonzero(values >= smallest)
    order = np.lexsort((indices, -values[indices]))[:count]
    return [int(index) for index in indices[order]]
