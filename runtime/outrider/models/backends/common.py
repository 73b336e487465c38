"""What backends have in common: capabilities as measured, and timed calls."""

import dataclasses
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

from outrider.models.backends.onnx_step import BufferPending, BufferStep
from outrider.types import Capabilities, Chunk, Exactness, RowRule


class MeasuredBackend:
    """A backend whose calls are padded by a measured rule.

    can: what it can do, whatever the rule; a subclass sets it before it calls `use`.
    """

    seconds = 0.0
    can_pad_apart = False
    can: Capabilities

    @property
    def separate_rules(self) -> Seq[RowRule]:
        """None."""
        return ()

    def use(self, exactness: Exactness) -> None:
        """Pad calls by this rule from now on, and report this exactness. Not while slots are open."""
        self.exactness = exactness
        rows = RowRule() if self.can.fixed else exactness.rule  # in fixed shapes there is nothing to pad
        self.capabilities = dataclasses.replace(self.can, bit_exact_batching=exactness.holds, rows=rows)

    def keep_rows(self, cost: Callable[[int], float], change: float) -> None:
        """Do nothing: the shapes of calls cost nothing."""

    @property
    def num_spare(self) -> int:
        """Positions for padding behind a sequence's last token."""
        return self.capabilities.rows.num_spare


class SequentialBackend(MeasuredBackend):
    """A backend that evaluates the sequences of a call one after another, in `evaluate`."""

    _thread: ThreadPoolExecutor | None = None

    def run_in_background(self, wanted: bool) -> None:
        """Evaluate in a thread of the backend's own, so that `submit` returns at once."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-backend") if wanted else None

    def submit(self, chunks: Seq[Chunk]) -> BufferStep | BufferPending:
        """Evaluate chunks of one or several sequences, one after another. A slot appears once at most.

        Each sequence is a call of its own, padded by the rule of `capabilities.rows`. No token sees the padding behind
        it, whose keys and values are overwritten by the next tokens.
        """
        for chunk in chunks:
            chunk.check_chain(self)
        return BufferPending(self._thread.submit(self._timed, chunks)) if self._thread else self._timed(chunks)

    def evaluate(self, chunks: Seq[Chunk]) -> BufferStep:
        """The rows of the chunks, which are chains."""
        raise NotImplementedError

    def _timed(self, chunks: Seq[Chunk]) -> BufferStep:
        began = time.perf_counter()
        step = self.evaluate(chunks)
        self.seconds += time.perf_counter() - began
        return step
