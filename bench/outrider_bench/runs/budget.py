"""A measurement that ends in time: `outrider bench --quick`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

QUICK_SECONDS = 600.0
FEWEST_TOKENS = 16


class Budget:
    """A time budget from now on, and the time that prompts took so far.

    clock: returns seconds; tests use another one.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._measuring_since: float | None = None
        self._num_prompts = 0

    @property
    def left(self) -> float:
        """Seconds left."""
        return self._end - self._clock()

    def choose_tokens(self, wanted: int, warm_up_seconds: float, num_prompts: int) -> int:
        """The answer length with which this smallest useful set of prompts takes half of the time left.

        warm_up_seconds: the time of one prompt in all modes, with answers of `wanted` tokens.
        """
        share = self.left / 2 / max(warm_up_seconds * num_prompts, 1e-9)
        return wanted if share >= 1 else min(wanted, max(FEWEST_TOKENS, int(wanted * share)))

    def fits(self, num_prompts: int) -> bool:
        """Whether `num_prompts` more prompts, in all modes, are likely to end in time; True for the first ones."""
        if self._measuring_since is None:
            self._measuring_since = self._clock()
        if not self._num_prompts:
            return True
        seconds = (self._clock() - self._measuring_since) / self._num_prompts
        return num_prompts * seconds <= self.left

    def count(self) -> None:
        """Count a prompt that has run in all modes."""
        self._num_prompts += 1
