"""The calls of an OpenVINO request: started, waited for, and timed. The wait for a call may come later.

A call is never cancelled: `InferRequest.cancel` leaves nodes of the CPU plugin's graph prepared for shapes that were
not computed, and all requests of a compiled model share that graph. Later calls fail, or return other numbers. Calls
are kept short instead; see `decoding.scheduler`. A call that fails half-way leaves the same: `GraphState` refuses
those after it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import openvino as ov

from outrider.errors import DeviceError, one_line


class GraphState:
    """Whether a compiled graph can be trusted: not after a call that failed, as its nodes may be half prepared."""

    def __init__(self, device: str) -> None:
        self._device, self._reason = device, ""

    @property
    def has_failed(self) -> bool:
        """Whether a call has failed."""
        return bool(self._reason)

    @contextmanager
    def calling(self, *, begins: bool = True) -> Iterator[None]:
        """A block that makes a call, or only waits for one unless it `begins`. Raises DeviceError if that fails.

        No call begins after one that has failed.
        """
        if self._reason and begins:
            raise DeviceError(
                f"{self._device} failed in an earlier call ({self._reason}), after which its results may be wrong. "
                "Load the model again."
            )
        try:
            yield
        except RuntimeError as error:
            self._reason = self._reason or one_line(error)
            raise DeviceError(f"{self._device} failed: {one_line(error)}") from error


class InferCalls:
    """The calls of a request on a device, one at a time.

    A call takes until its end if that is watched, otherwise until `wait` returns. graph: of all requests that share
    the compiled graph.
    """

    def __init__(self, request: ov.InferRequest, graph: GraphState) -> None:
        self._request, self.graph = request, graph
        self._at = [0.0]  # when the last call ended, in seconds of `time.perf_counter`

    def watch(self, wanted: bool) -> None:
        """Start to record the end of each call, or stop."""
        at = self._at  # only the list: a reference to the backend would be a cycle that is never freed

        def note(_: object) -> None:
            at[0] = time.perf_counter()

        self._request.set_callback(note if wanted else lambda _: None, None)

    @property
    def is_idle(self) -> bool:
        """Whether no call is running. A call that failed raises in `wait`."""
        try:
            return bool(self._request.wait_for(0))
        except RuntimeError:
            return True

    def seconds_since(self, began: float) -> float:
        """Seconds of a call that began at `began` and has been waited for."""
        return (self._at[0] if self._at[0] > began else time.perf_counter()) - began

    def start(self) -> None:
        """Start a call, or raise DeviceError."""
        with self.graph.calling():
            self._request.start_async()

    def wait(self) -> None:
        """Wait for the running call; raises as `Pending.wait`."""
        with self.graph.calling(begins=False):
            self._request.wait()
