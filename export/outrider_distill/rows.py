"""A row of logits to a token, and to the probabilities of the likeliest ones.

Rows are read one by one: a row fits in a core's cache, a batch of them does not. Each is passed over twice. All that is
expensive works on the few tokens that are near the likeliest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import DeviceError
from outrider.types import Logits

NUM_KEPT = 32
# Nats below the likeliest token. Those farther away count as 0: each has less than 1.2e-7 of its probability.
_MARGIN = 16.0
LEAST = 1e-4  # the smallest probability to keep, as a share of the likeliest token's


class Near(NamedTuple):
    """The tokens of a row that are near the likeliest.

    best: the likeliest. token_ids: int64 [n], ascending. logits: float32 [n], less the largest.
    """

    best: int
    token_ids: NDArray[np.int64]
    logits: NDArray[np.float32]


def near_best(logits: Logits) -> Near:
    """The tokens near the likeliest. logits: float32 [vocab].

    Raises:
        DeviceError: when the largest logit is not finite, which only broken weights or a broken driver produce.
    """
    best = int(logits.argmax())
    highest = logits[best]
    if not np.isfinite(highest):
        raise DeviceError(
            f"The main model's logits are not finite ({highest} for token {best}). Check the bundle with "
            "'outrider inspect --check'."
        )
    token_ids = np.flatnonzero(logits > highest - np.float32(_MARGIN))
    return Near(best, token_ids, logits[token_ids] - highest)


def draw(near: Near, temperature: float, uniform: float) -> int:
    """A token sampled at a temperature above 0. uniform: in [0, 1), the place in the cumulative distribution."""
    sums = np.exp(near.logits / np.float32(temperature)).cumsum(dtype=np.float64)
    at = int(sums.searchsorted(uniform * sums[-1], side="right"))
    return int(near.token_ids[min(at, len(sums) - 1)])


def likeliest(near: Near) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The likeliest tokens, int64 [n], and their probabilities at temperature 1, float32 [n], descending.

    At most `NUM_KEPT`, and those only that have 1e-4 of the likeliest one's probability.
    """
    weights = np.exp(near.logits)
    kept = np.flatnonzero(weights > LEAST)
    if len(kept) > NUM_KEPT:
        kept = kept[np.argpartition(weights[kept], -NUM_KEPT)[-NUM_KEPT:]]
    kept = kept[np.lexsort((kept, -weights[kept]))]
    return near.token_ids[kept], weights[kept] / weights.sum(dtype=np.float64).astype(np.float32)
