"""What backends have in common: capabilities as measured, timed calls, and rows in their own memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.models.backends.features import WithoutFeatures
from outrider.models.backends.infer_calls import GraphState
from outrider.models.kv import Prefixes
from outrider.types import Capabilities, Chunk, Exactness, Logits, LogitsRow, RowCost, RowRule


class MeasuredBackend:
    """A backend whose calls are padded by a measured rule.

    can: what it can do, whatever the rule; a subclass sets it before it calls `use`.
    """

    seconds = 0.0
    can_pad_apart = False
    can_divide = False
    few_rows_differ = False
    can: Capabilities
    graph: GraphState | None = None  # of calls that leave something where they fail

    @property
    def has_failed(self) -> bool:
        """Whether a call has failed, and the model has to be loaded again."""
        return self.graph is not None and self.graph.has_failed

    @property
    def prefixes(self) -> Prefixes | None:
        """The prefix cache as `PrefixStore` uses it; None: it cannot be saved."""
        return None

    @property
    def separate_rules(self) -> Sequence[RowRule]:
        """None."""
        return ()

    def use(self, exactness: Exactness) -> None:
        """Pad calls by this rule from now on, and report this exactness. Not while slots are open."""
        self.exactness = exactness
        rows = RowRule() if self.can.fixed else exactness.rule  # in fixed shapes there is nothing to pad
        self.capabilities = dataclasses.replace(
            self.can, bit_exact_batching=exactness.holds, expects_exact=exactness.is_expected, rows=rows
        )

    def keep_rows(self, cost: RowCost) -> None:
        """Do nothing: the shapes of calls cost nothing."""

    @property
    def num_spare(self) -> int:
        """Positions for padding after a sequence's last token."""
        return self.capabilities.rows.num_spare


@dataclass(frozen=True, slots=True)
class BufferStep(WithoutFeatures):
    """Rows of logits, [rows, logits width], in the backend's memory. Valid until the next call.

    _wanted: which of them each chunk asked for. _hidden: the hidden states that a chunk asked for, float32 [n, width]
    each.
    """

    _logits: NDArray[Any]
    _wanted: Mapping[Chunk, range]
    _vocab_size: int
    _hidden: Mapping[Chunk, Sequence[NDArray[np.float32]]]
    done = True

    def features(self, chunk: Chunk) -> NDArray[np.float32]:
        """The hidden states that a chunk asked for, float32 [n, width], concatenated."""
        hidden = self._hidden[chunk]
        if not hidden or len(hidden) < len(chunk.features):
            return WithoutFeatures.features(self, chunk)
        return np.concatenate(hidden, axis=1)

    def wait(self) -> BufferStep:
        """The rows are there already."""
        return self

    def rows(self, chunk: Chunk) -> list[LogitsRow]:
        """The rows that a chunk asked for, cut to the real vocabulary, in host memory."""
        return [LogitsRow(partial(self._row, i)) for i in self._wanted[chunk]]

    def _row(self, i: int) -> Logits:
        return self._logits[i, : self._vocab_size].astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True)
class BufferPending:
    """A call in the backend's own thread."""

    _future: Future[BufferStep]

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._future.done()

    def wait(self) -> BufferStep:
        """Block until the rows are there; see `Pending`."""
        return self._future.result()


class SequentialBackend(MeasuredBackend):
    """A backend that evaluates the sequences of a call one after another, in `evaluate`."""

    _thread: ThreadPoolExecutor | None = None

    def run_in_background(self, wanted: bool) -> None:
        """Evaluate in a thread of the backend's own, so that `submit` returns at once."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-backend") if wanted else None

    def submit(self, chunks: Sequence[Chunk]) -> BufferStep | BufferPending:
        """Evaluate chunks of one or several sequences, each in a call of its own.

        Calls are padded by the rule of `capabilities.rows`. No token sees the padding after it, whose keys and values
        are overwritten by the next tokens.
        """
        for chunk in chunks:
            chunk.check_chain(self)
        return BufferPending(self._thread.submit(self._timed, chunks)) if self._thread else self._timed(chunks)

    def evaluate(self, chunks: Sequence[Chunk]) -> BufferStep:
        """The rows of the chunks, which are chains."""
        raise NotImplementedError

    def _timed(self, chunks: Sequence[Chunk]) -> BufferStep:
        began = time.perf_counter()
        step = self.evaluate(chunks)
        self.seconds += time.perf_counter() - began
        return step
