"""The result of an OpenVINO call: rows of logits, and hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import openvino as ov

from outrider.models.backends.features import WithoutFeatures
from outrider.types import Chunk, LogitsRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from outrider.models.backends.openvino_paged import OpenVINOPaged


@dataclass(eq=False, slots=True)
class PagedStep(WithoutFeatures):
    """Rows of logits, in the output tensors of the request: valid until the next call.

    chunks: those of the call. logits: float32 [r, vocab_size], the rows that they asked for in their order. hidden:
    hidden states float32 [n, width] of all rows of the call, by name. places: the rows of each chunk's tokens among
    these.
    """

    chunks: Sequence[Chunk]
    logits: NDArray[np.float32]
    hidden: Mapping[str, NDArray[np.float32]]
    places: Mapping[Chunk, Sequence[int]]

    def features(self, chunk: Chunk) -> NDArray[np.float32]:
        """The hidden states that a chunk asked for, float32 [n, width], concatenated."""
        if not chunk.features or not set(chunk.features) <= self.hidden.keys():
            return WithoutFeatures.features(self, chunk)
        places = [*self.places[chunk]]
        parts = [self.hidden[name][places] for name in chunk.features]
        return np.concatenate(parts, axis=1)

    def rows(self, chunk: Chunk) -> list[LogitsRow]:
        """The rows that a chunk asked for, cut to the real vocabulary."""
        first = 0
        for each in self.chunks:
            if each is chunk:
                break
            first += each.num_rows
        else:
            raise KeyError(chunk)
        return [LogitsRow.of(row) for row in self.logits[first : first + chunk.num_rows]]


class Outputs:
    """The outputs of one infer request.

    Outputs(request, vocab_size).step(chunks, places)
    """

    def __init__(self, request: ov.InferRequest, vocab_size: int, features: Sequence[str] = ()) -> None:
        self._request = request
        self._features = tuple(features)
        self._vocab_size = vocab_size

    def step(self, chunks: Sequence[Chunk], places: Mapping[Chunk, Sequence[int]]) -> PagedStep:
        """The results of the call that has ended. chunks, places: as in `PagedStep`."""
        hidden = {name: self._request.get_tensor(name).data for name in self._features}
        logits = self._request.get_tensor("logits").data[:, 0, : self._vocab_size]
        return PagedStep(chunks, logits, hidden, places)


class PagedPending:
    """A running call, since `began` in seconds of `time.perf_counter`."""

    def __init__(self, backend: OpenVINOPaged, began: float) -> None:
        self._backend = backend
        self._began = began

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._backend.is_idle

    def wait(self) -> PagedStep:
        """Block until the rows are there; see `Pending`."""
        return self._backend.finish(self._began)
