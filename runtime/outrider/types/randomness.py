"""Distributions of tokens, and the random numbers that tokens are drawn with."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Distribution:
    """The probabilities of all tokens whose probability is not 0.

    token_ids: int64 [n], ascending. probs: float64 [n], summing to 1.
    """

    token_ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    def prob(self, token_id: int) -> float:
        """The probability of one token, 0 outside the support."""
        at = int(np.searchsorted(self.token_ids, token_id))
        if at < len(self.token_ids) and self.token_ids[at] == token_id:
            return float(self.probs[at])
        return 0.0

    def draw(self, uniform: float) -> int:
        """The token at `uniform` in [0, 1) of the cumulative distribution."""
        cumulative = np.cumsum(self.probs)
        # Scaling by the last sum, which may be 1 ± 1e-16, keeps the draw inside the support.
        at = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        return int(self.token_ids[min(at, len(self.token_ids) - 1)])

    def without(self, token_id: int) -> Distribution:
        """The distribution given that it is another token; empty if there is no other."""
        others = self.token_ids != token_id
        probs = self.probs[others]
        return Distribution(self.token_ids[others], probs / probs.sum())


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers as a function of the position they are used at, without hidden state.

    Counter-based (Philox 4x64-10; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): the same key
    gives the same numbers on every platform.
    """

    seed: int
    sample: int = 0

    def uniforms(self, position: int, purpose: str, count: int) -> NDArray[np.float64]:
        """`count` independent numbers in [0, 1) for one purpose of the round that begins at `position`.

        Rounds begin at different positions, so no two rounds share a number. Block-wise acceptance would be biased
        if they did.
        """
        bits = np.random.Philox(
            key=self.seed + (self.sample << 64), counter=(position << 128) + (zlib.crc32(purpose.encode()) << 64)
        ).random_raw(count)
        return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def gumbel(self, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Standard Gumbel noise float64 [n] for tokens at a position. A token's noise depends on nothing else.

        Each position has a SplitMix64 sequence (Steele et al. 2014, "Fast splittable pseudorandom number generators")
        that starts at a Philox number. A token's number is the one at its id.
        """
        key, counter = self.seed + (self.sample << 64), (position << 128) + (_GUMBEL << 64)
        bits = np.random.Philox(key=key, counter=counter).random_raw(1)
        bits = bits + (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
        # The middle of each interval: never 0, never 1.
        uniforms = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return -np.log(-np.log(uniforms))


_GUMBEL = zlib.crc32(b"gumbel")
