"""A model of NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.kv import num_common_tokens
from outrider.types import Capabilities, Exactness, LogitsRow

if TYPE_CHECKING:
    from collections.abc import Callable
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
    shifts: list[int] = field(default_factory=list)  # for every token, by which kernels it was read
    closed: bool = False
    num_kept: int = 0

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self.token_ids)

    def trim(self, length: int) -> None:
        """Drop the newest tokens until `length` are left."""
        del self.token_ids[length:], self.shifts[length:]
        self.num_kept = min(self.num_kept, length)

    def skip_to(self, length: int) -> None:
        """Take `length` tokens to be in the cache."""
        self.token_ids, self.shifts = [0] * length, [0] * length

    def keep(self, token_ids: Seq[int]) -> None:
        """Of committed tokens, have the backend keep those that are here."""
        self.num_kept = num_common_tokens(self.token_ids, token_ids)

    def close(self) -> None:
        """Give the place back."""
        if self.num_kept and not self.closed:
            self.backend.kept.append((self.token_ids[: self.num_kept], self.shifts[: self.num_kept]))
        self.closed = True


class FakeBackend:
    """A model whose logits are a fixed random function of the last `memory` tokens and the position.

        backend = FakeBackend(vocab_size=16, seed=1)

    noise: how far it is from the noiseless model of the same seed, for drafts that are right now and then. Fails the
    test that uses it when a slot is overfilled, appears twice in a call, or is used after it was closed.

    kernels, attention_kernels: real processors calculate in different orders, depending on the rows of a call and on
    the rows of a sequence. Where they are given, a row's logits depend a little on which kernel (any number) has read
    each token before it; without padding, and unless `use` has been given some::

        FakeBackend(16, kernels=lambda rows: 0 if rows % 8 == 0 else rows)
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        seed: int = 0,
        noise: float = 0.0,
        memory: int = 2,
        kernels: Callable[[int], int] | None = None,
        attention_kernels: Callable[[int], int] | None = None,
        can_pad_apart: bool = False,
    ) -> None:
        self.vocab_size, self.seed, self.noise, self.memory = vocab_size, seed, noise, memory
        self.can_pad_apart = can_pad_apart
        self._kernels, self._attention_kernels = kernels, attention_kernels
        self.seconds = 0.0
        self.max_tokens = _MAX_TOKENS
        self.kept: list[tuple[list[int], list[int]]] = []  # texts that later ones may begin with, and their shifts
        self.calls: list[list[int]] = []  # for every call, how many tokens each chunk had
        self.num_rows: list[int] = []  # for every call, the rows that it computed, padding included
        self.use(Exactness())
        # A model without kernels has one order to calculate in.
        self.capabilities = Capabilities(bit_exact_batching=kernels is None and attention_kernels is None)

    def use(self, exactness: Exactness) -> None:
        """Pad calls by its rule, and claim what it says."""
        self.exactness = exactness
        self.capabilities = Capabilities(bit_exact_batching=exactness.holds, rows=exactness.rule)

    def open(self, max_tokens: int, token_ids: Seq[int] = ()) -> FakeSlot:
        """A slot; there is always room, and all that was kept stays."""
        text = list(token_ids[:-1])
        found = max(self.kept, key=lambda kept: num_common_tokens(kept[0], text), default=([], []))
        num_cached = num_common_tokens(found[0], text)
        return FakeSlot(self, max_tokens, text[:num_cached], found[1][:num_cached])

    def submit(self, chunks: Seq[Chunk]) -> FakeBackend.Step:
        """Evaluate chunks at once; the step is its own pending."""
        self.calls.append([len(chunk.token_ids) for chunk in chunks])
        if len({id(chunk.slot) for chunk in chunks}) != len(chunks):
            raise AssertionError("a slot appears twice in one call")
        rule = self.capabilities.rows
        counts = [len(chunk.token_ids) for chunk in chunks]
        self.num_rows.append(rule.num_rows(counts))
        of_call = self._kernels(self.num_rows[-1]) if self._kernels else 0
        rows = []
        for chunk, count in zip(chunks, counts, strict=True):
            slot: FakeSlot = chunk.slot
            of_sequence = self._attention_kernels(rule.sequence(count)) if self._attention_kernels else 0
            if slot.closed or slot.backend is not self or slot.length + len(chunk.token_ids) > slot.max_tokens:
                raise AssertionError(f"slot closed, foreign or overfilled: {slot}")
            for i, token_id in enumerate(chunk.token_ids, 1):
                slot.token_ids.append(token_id)
                slot.shifts.append(1000 * of_call + of_sequence)
                if i > len(chunk.token_ids) - chunk.num_rows:
                    rows.append(self.logits_after(slot.token_ids) + self._shift(slot.shifts))
        return FakeBackend.Step(rows)

    def logits_after(self, token_ids: Seq[int]) -> Logits:
        """float32 [vocab_size] for the token behind these."""
        key = [len(token_ids), *token_ids[-self.memory :]]

        def normal(seed: int) -> Any:
            return np.random.default_rng([seed, *key]).standard_normal(self.vocab_size)

        own = self.noise * normal(self.seed + 1) if self.noise else 0
        logits: Logits = (2 * (normal(self.seed) + own)).astype(np.float32)
        return logits

    def _shift(self, shifts: list[int]) -> Any:
        """What the kernels that have read the tokens so far do to a row: as much as another precision would."""
        if not any(shifts):
            return np.float32(0)
        return (
            np.random.default_rng(abs(hash(tuple(shifts)))).normal(scale=0.3, size=self.vocab_size).astype(np.float32)
        )

    @dataclass(frozen=True, slots=True)
    class Step:
        """Rows that are there already."""

        rows: list[NDArray[np.float32]]
        done = True

        def wait(self) -> FakeBackend.Step:
            """There is nothing to wait for."""
            return self

        def row(self, i: int) -> LogitsRow:
            """Row i, without its largest logits."""
            return LogitsRow.of(self.rows[i])
