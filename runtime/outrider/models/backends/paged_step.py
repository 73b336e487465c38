"""The result of an OpenVINO call: rows of logits, and the largest of each row if the graph picks them out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov

from outrider.models.backends.features import WithoutFeatures
from outrider.models.backends.paged_graph import TOP
from outrider.tokens.sampling.top import TOLERANCE
from outrider.types import LogitsRow, TopLogits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from outrider.models.backends.openvino_paged import OpenVINOPaged
    from outrider.types import Chunk, Logits


@dataclass(frozen=True, slots=True)
class PagedStep(WithoutFeatures):
    """Rows of logits, in the output tensors of the request: valid until the next call.

    read: gives row i, float32 [vocab_size]. top: token_ids int32 [rows, k], their logits float32 [rows, k] with the
    largest first, and the rows' log-sum-exp float32 [rows]; None if the graph does not pick them out. hidden: hidden
    states float32 [n, width] of all rows of the call, by name. places: the rows of each chunk's tokens among these,
    int64 [n], by the id of its slot.
    """

    read: Callable[[int], Logits]
    vocab_size: int
    top: tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]] | None
    hidden: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    places: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)

    def features(self, chunk: Chunk) -> NDArray[np.float32]:
        """The hidden states that a chunk asked for, float32 [n, width], concatenated."""
        if not chunk.features or not set(chunk.features) <= self.hidden.keys():
            return WithoutFeatures.features(self, chunk)
        places = self.places[id(chunk.slot)]
        parts = [self.hidden[name][places] for name in chunk.features]
        return np.concatenate(parts, axis=1)

    def row(self, i: int) -> LogitsRow:
        """Row i, cut to the real vocabulary."""
        return LogitsRow(lambda: self.read(i), self._top(i))

    def _top(self, i: int) -> TopLogits | None:
        if self.top is None:
            return None
        token_ids, logits, logsumexp = (values[i] for values in self.top)
        order = token_ids.argsort()
        return TopLogits(
            token_ids=token_ids[order].astype(np.int64),
            logits=logits[order],
            bound=float(logits[-1]),
            logsumexp=float(logsumexp),
            vocab_size=self.vocab_size,
        )


class Outputs:
    """The outputs of one infer request, for as many rows as a call has.

        Outputs(compiled, request, vocab_size, has_top=True, on_device=True).step()

    has_top: whether `add_top_logits` was applied. on_device: leave the rows in the device's memory, and fetch each one
    when it is needed. The GPU plugin moves an output to the host at the end of every call unless it was given a tensor.
    Written against the documented interface of remote tensors; not verified on hardware.
    """

    def __init__(
        self,
        compiled: ov.CompiledModel,
        request: ov.InferRequest,
        vocab_size: int,
        *,
        has_top: bool,
        on_device: bool,
        features: Sequence[str] = (),
    ) -> None:
        self._request = request
        self._features = tuple(features)
        self._vocab_size = vocab_size
        self.has_top = has_top
        self._width: int = compiled.output("logits").get_partial_shape()[2].get_length()
        self._remote: Any = None
        if on_device:  # it grows with the rows of a call
            self._remote = compiled.get_context().create_tensor(ov.Type.f32, ov.Shape([1, 1, self._width]), {})
            request.set_tensor("logits", self._remote)

    def step(self, places: Mapping[int, NDArray[np.int64]]) -> PagedStep:
        """The rows of the call that has ended. places: as in `PagedStep`."""
        hidden = {name: self._request.get_tensor(name).data for name in self._features}
        read = self._fetch
        if self._remote is None:
            read = self._request.get_tensor("logits").data[:, 0, : self._vocab_size].__getitem__
        if not self.has_top:
            return PagedStep(read, self._vocab_size, None, hidden, places)
        token_ids, logits, logsumexp = (self._request.get_tensor(name).data[:, 0] for name in TOP)
        return PagedStep(read, self._vocab_size, (token_ids, logits, logsumexp[:, 0]), hidden, places)

    def agrees(self, step: PagedStep, num_rows: int) -> bool:
        """Whether the logits that the device picked out are the largest of each row, bit for bit."""
        for i in range(num_rows):
            row, top = step.row(i).full(), step.row(i).top
            if top is None:
                return False
            logsumexp = np.logaddexp.reduce(row.astype(np.float64))
            same = np.array_equal(row[top.token_ids], top.logits)
            largest = not (np.delete(row, top.token_ids) > top.bound).any()
            if not same or not largest or not abs(logsumexp - top.logsumexp) < TOLERANCE / 4:
                return False
        return True

    def _fetch(self, i: int) -> Logits:
        """Row i of the last call, from the device."""
        begin, end = ov.Coordinate([i, 0, 0]), ov.Coordinate([i + 1, 1, self._width])
        host = ov.Tensor(ov.Type.f32, ov.Shape([1, 1, self._width]))
        ov.RemoteTensor(self._remote, begin, end).copy_to(host)
        row: Logits = host.data[0, 0, : self._vocab_size]
        return row


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
