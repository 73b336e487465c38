"""A sequence on an NPU: its slot, the windows of its tokens, and the rows of its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.models.backends.features import WithoutFeatures
from outrider.models.kv import Unbranched
from outrider.types import Chunk, LogitsRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from outrider.models.backends.openvino_npu import OpenVINONpu


class WindowSlot(Unbranched):
    """A sequence's tokens. The first `num_stored` have keys and values on the device. One slot is open at a time.

    The slot remembers its tokens, because a window is always evaluated whole, from its first position on. The prefill
    model has read the first `num_read` tokens.
    """

    def __init__(self, backend: OpenVINONpu, token_ids: Sequence[int] = (), scope: bytes = b"") -> None:
        self.token_ids = list(token_ids)
        self.scope = scope
        self.num_stored = self.num_read = len(token_ids)
        self._backend = backend

    @property
    def length(self) -> int:
        """Tokens that were submitted and not trimmed."""
        return len(self.token_ids)

    def trim(self, length: int) -> None:
        """Drop the newest tokens until `length` are left. Their keys and values are masked, then overwritten."""
        del self.token_ids[length:]
        self.num_stored = min(self.num_stored, length)
        self.num_read = min(self.num_read, length)

    def publish(self, token_ids: Sequence[int]) -> None:
        """Do nothing: the next prompt can start from the last prompt's prefix in any case."""

    def skip_to(self, length: int) -> None:
        """Pretend that the slot holds about `length` tokens, up to a window's end; see `BenchmarkSlot`."""
        self._backend.end_prefill()
        self.token_ids = [0] * self._backend.sizes.window_begin(length)
        self.num_stored, self.num_read = self.length, 0

    def close(self) -> None:
        """Release the slot. Closing twice does no harm."""
        self._backend.give_back(self)


@dataclass(frozen=True, slots=True)
class WindowStep(WithoutFeatures):
    """Rows of logits, each [logits width], of the only chunk: one slot is open at a time.

    The last window's rows are device memory, valid until the next call.
    """

    _rows: Sequence[NDArray[Any]]
    _vocab_size: int

    def rows(self, chunk: Chunk) -> list[LogitsRow]:  # noqa: ARG002
        """The rows that were asked for, cut to the real vocabulary. NPUW returns whole rows."""
        return [LogitsRow.of(row[: self._vocab_size].astype(np.float32, copy=False)) for row in self._rows]


@dataclass(frozen=True, slots=True)
class Window:
    """One call: the window of `slot` that begins at `begin`; the rows from token `first` to `end` are wanted."""

    slot: WindowSlot
    begin: int
    first: int
    end: int


class WindowPending:
    """A submit. `last` is its running window, since `began` in seconds of `time.perf_counter`; None if none runs."""

    def __init__(self, backend: OpenVINONpu, rows: list[NDArray[Any]], last: Window | None, began: float) -> None:
        self._backend, self._rows, self._last, self._began = backend, rows, last, began

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._last is None or self._backend.is_idle

    def wait(self) -> WindowStep:
        """Block until the rows are there; see `Pending`."""
        last, self._last = self._last, None
        if last is not None:
            self._rows += self._backend.finish(last, self._began)
        return WindowStep(self._rows, self._backend.vocab_size)
