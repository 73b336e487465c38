"""The rows of a call of a model in ONNX, at once or when its thread is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.models.backends.features import WithoutFeatures
from outrider.types import Chunk, LogitsRow


@dataclass(frozen=True, slots=True)
class BufferStep(WithoutFeatures):
    """Rows of logits, [rows, logits width], in the backend's memory. Valid until the next call.

    _wanted: which of them were asked for. _hidden: the hidden states that a chunk asked for, float32 [n, width] each,
    by the id of its slot.
    """

    _logits: NDArray[Any]
    _wanted: Seq[int]
    _vocab_size: int
    _hidden: Mapping[int, Seq[NDArray[np.float32]]]
    done = True

    def features(self, chunk: Chunk) -> NDArray[np.float32]:
        """The hidden states that a chunk asked for, float32 [n, width], concatenated."""
        hidden = self._hidden[id(chunk.slot)]
        if not hidden or len(hidden) < len(chunk.features):
            return WithoutFeatures.features(self, chunk)
        return np.concatenate(hidden, axis=1)

    def wait(self, unless: Callable[[], bool] | None = None) -> BufferStep:  # noqa: ARG002
        """The rows are there already."""
        return self

    def row(self, i: int) -> LogitsRow:
        """Row i, cut to the real vocabulary, in host memory."""
        return LogitsRow.of(self._logits[self._wanted[i], : self._vocab_size].astype(np.float32, copy=False))


@dataclass(frozen=True, slots=True)
class BufferPending:
    """A call in the backend's own thread."""

    _future: Future[BufferStep]

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._future.done()

    def wait(self, unless: Callable[[], bool] | None = None) -> BufferStep:  # noqa: ARG002
        """Block until the rows are there.

        Raises:
            DeviceError: when the device failed.
        """
        return self._future.result()
