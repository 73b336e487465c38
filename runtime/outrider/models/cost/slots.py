"""The tokens, slots and rows of calls that are made for measurements. Nothing else may run meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from outrider.types import NO_PROMPT, Backend, BenchmarkSlot, Chunk, Pending, Prompt, Slot, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


def random_tokens(backend: Backend, count: int) -> list[int]:
    """Tokens of a model's vocabulary, the same at every call, and as the beginning of more of them.

    They differ from one another, because a mixture of experts reads the weights of all experts that any token of a call
    activates. Equal tokens activate the same ones, so that a call of several would seem to cost what one token does.
    """
    token_ids: list[int] = np.random.default_rng(0).integers(backend.vocab_size, size=count).tolist()
    return token_ids


def open_slot(backend: Backend, max_tokens: int, prompt: Prompt = NO_PROMPT) -> BenchmarkSlot:
    """A slot with room for `max_tokens`."""
    slot = backend.open(max_tokens, prompt)
    if slot is None:
        raise AssertionError("the cache has no room: nothing else may run beside a measurement")
    return cast("BenchmarkSlot", slot)  # each backend's own slots are


def copied_rows(step: Step, chunk: Chunk) -> list[NDArray[np.float32]]:
    """The logits of a chunk's rows, float32 [vocab_size] each, which stay valid."""
    return [row.full().copy() for row in step.rows(chunk)]


class GaveWay(Exception):
    """A measurement was left because somebody else needs the model."""


class GivingWay:
    """A backend that makes no call once somebody else needs the model: `submit` raises `GaveWay`. All else is its own.

    CallTimes(GivingWay(backend, is_cancelled), rows).measure()

    What is opened does not count in the statistics of the prefix cache.
    """

    def __init__(self, backend: Backend, is_cancelled: Callable[[], bool]) -> None:
        self._backend, self._is_cancelled = backend, is_cancelled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> Slot | None:
        """A slot that is not counted."""
        return self._backend.open(max_tokens, replace(prompt, counted=False))

    def submit(self, chunks: Sequence[Chunk]) -> Pending:
        """Make a call, or raise `GaveWay`."""
        if self._is_cancelled():
            raise GaveWay
        return self._backend.submit(chunks)


class Adapted:
    """A backend whose slots all have an adapter. All else is the backend's own.

    measure_exactness(Adapted(backend, "pirate"))    # of rows that have the adapter
    """

    def __init__(self, backend: Backend, adapter: str) -> None:
        self._backend, self._adapter = backend, adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def open(self, max_tokens: int, prompt: Prompt = NO_PROMPT) -> Slot | None:
        """A slot with the adapter."""
        return self._backend.open(max_tokens, replace(prompt, adapter=self._adapter))
