"""A model of NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.types import Capabilities

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from numpy.typing import NDArray

    from outrider.types import Chunk, Logits

_MAX_TOKENS = 2048


@dataclass(slots=True)
class FakeSlot:
    """The tokens themselves stand for their keys and values."""

    backend: FakeBackend
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    closed: bool = False

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self.token_ids)

    def trim(self, length: int) -> None:
        """Drop the newest tokens until `length` are left."""
        del self.token_ids[length:]

    def skip_to(self, length: int) -> None:
        """Take `length` tokens to be in the cache."""
        self.token_ids = [0] * length

    def close(self) -> None:
        """Give the place back."""
        self.closed = True


class FakeBackend:
    """A model whose logits are a fixed random function of the last `memory` tokens and the position.

        backend = FakeBackend(vocab_size=16, seed=1)

    noise: how far it is from the noiseless model of the same seed, for drafts that are right now and then. Fails the
    test that uses it when a slot is overfilled, appears twice in a call, or is used after it was closed.
    """

    capabilities = Capabilities(bit_exact_batching=True, min_rows=1)

    def __init__(self, vocab_size: int, *, seed: int = 0, noise: float = 0.0, memory: int = 2) -> None:
        self.vocab_size, self.seed, self.noise, self.memory = vocab_size, seed, noise, memory
        self.seconds = 0.0
        self.max_tokens = _MAX_TOKENS
        self.calls: list[list[int]] = []  # for every call, how many tokens each chunk had

    def open(self, max_tokens: int) -> FakeSlot:
        """A slot; there is always room."""
        return FakeSlot(self, max_tokens)

    def submit(self, chunks: Seq[Chunk]) -> FakeBackend.Step:
        """Evaluate chunks at once; the step is its own pending."""
        self.calls.append([len(chunk.token_ids) for chunk in chunks])
        if len({id(chunk.slot) for chunk in chunks}) != len(chunks):
            raise AssertionError("a slot appears twice in one call")
        rows = []
        for chunk in chunks:
            slot: FakeSlot = chunk.slot
            if slot.closed or slot.backend is not self or slot.length + len(chunk.token_ids) > slot.max_tokens:
                raise AssertionError(f"slot closed, foreign or overfilled: {slot}")
            for i, token_id in enumerate(chunk.token_ids, 1):
                slot.token_ids.append(token_id)
                if i > len(chunk.token_ids) - chunk.num_rows:
                    rows.append(self.logits_after(slot.token_ids))
        return FakeBackend.Step(rows)

    def logits_after(self, token_ids: Seq[int]) -> Logits:
        """float32 [vocab_size] for the token behind these."""
        key = [len(token_ids), *token_ids[-self.memory :]]

        def normal(seed: int) -> Any:
            return np.random.default_rng([seed, *key]).standard_normal(self.vocab_size)

        own = self.noise * normal(self.seed + 1) if self.noise else 0
        logits: Logits = (2 * (normal(self.seed) + own)).astype(np.float32)
        return logits

    @dataclass(frozen=True, slots=True)
    class Step:
        """Rows that are there already."""

        rows: list[NDArray[np.float32]]
        done = True

        def wait(self) -> FakeBackend.Step:
            """There is nothing to wait for."""
            return self

        def logits(self, i: int) -> Logits:
            """Row i."""
            row: Logits = self.rows[i]
            return row

        def top_logits(self, i: int) -> None:
            """Not looked for."""
