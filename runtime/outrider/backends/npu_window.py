"""A sequence on an NPU: its place, the windows that its tokens are in, and the rows that calls give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from outrider.backends.features import WithoutFeatures
from outrider.types import LogitsRow

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from numpy.typing import NDArray

    from outrider.backends.npu_sizes import Sizes


class Windows(Protocol):
    """What slots and calls under way ask of the backend that made them."""

    sizes: Sizes
    vocab_size: int

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""

    def end_prefill(self) -> None:
        """Let the decoding model begin anywhere, on a cache that holds nothing of use."""

    def give_back(self, slot: WindowSlot) -> None:
        """A slot's room."""

    def finish(self, window: Window, began: float) -> list[NDArray[Any]]:
        """Wait for the last window of a submit that began at `began`; its wanted rows."""


class WindowSlot:
    """A sequence's tokens, of which the first `num_stored` have keys and values on the device. One is open at a time.

    Tokens are kept, because a window is evaluated whole, from its place's beginning on. Of those that are stored, the
    prefill model has read the first `num_read`.
    """

    def __init__(self, backend: Windows, token_ids: Seq[int] = (), scope: bytes = b"") -> None:
        self.token_ids = list(token_ids)
        self.scope = scope
        self.num_stored = self.num_read = len(token_ids)
        self._backend = backend

    @property
    def length(self) -> int:
        """Tokens that were given, and not trimmed."""
        return len(self.token_ids)

    def trim(self, length: int) -> None:
        """Drop the newest tokens until `length` are left. What they wrote is masked, and overwritten."""
        del self.token_ids[length:]
        self.num_stored = min(self.num_stored, length)
        self.num_read = min(self.num_read, length)

    def publish(self, token_ids: Seq[int]) -> None:
        """Nothing to do: of the last prompt, what can be read on from is there for the next one anyway."""

    def skip_to(self, length: int) -> None:
        """Take about `length` tokens to be in the cache, for measurements: as many as end with a window."""
        self._backend.end_prefill()
        self.token_ids = [0] * self._backend.sizes.window_begin(length)
        self.num_stored, self.num_read = self.length, 0

    def close(self) -> None:
        """Give the place back. Closing twice does no harm."""
        self._backend.give_back(self)


@dataclass(frozen=True, slots=True)
class WindowStep(WithoutFeatures):
    """Rows of logits, each [logits width]. Those of the last window are the device's: valid until the next call."""

    _rows: Seq[NDArray[Any]]
    _vocab_size: int

    def row(self, i: int) -> LogitsRow:
        """Row i, cut to the real vocabulary. NPUW hands over whole rows."""
        return LogitsRow.of(self._rows[i][: self._vocab_size].astype(np.float32, copy=False))


@dataclass(frozen=True, slots=True)
class Window:
    """One call: the window of `slot` that begins at `begin`; the rows from token `first` to `end` are wanted."""

    slot: WindowSlot
    begin: int
    first: int
    end: int


class WindowPending:
    """A submit whose last window is under way since `began`, in seconds of `time.perf_counter`; or none is."""

    def __init__(self, backend: Windows, rows: list[NDArray[Any]], last: Window | None, began: float) -> None:
        self._backend, self._rows, self._last, self._began = backend, rows, last, began

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._last is None or self._backend.is_idle

    def wait(self) -> WindowStep:
        """Block until the rows are there.

        Raises:
            DeviceError: when the device failed.
        """
        last, self._last = self._last, None
        if last is not None:
            self._rows += self._backend.finish(last, self._began)
        return WindowStep(self._rows, self._backend.vocab_size)
