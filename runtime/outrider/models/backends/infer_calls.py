"""The calls of an OpenVINO request: started, waited for or cancelled, and timed. The wait for a call may come later."""

import time
from collections.abc import Callable

import openvino as ov

from outrider.errors import DeviceError, one_line
from outrider.types import CallCancelled

_PATIENCE = 100  # milliseconds until it is asked whether a call is still wanted


class InferCalls:
    """The calls of a request on a device, one at a time.

    A call takes until its end if that is watched, otherwise until `wait` returns.
    """

    def __init__(self, request: ov.InferRequest, device: str) -> None:
        self._request, self._device = request, device
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
        try:
            self._request.start_async()
        except RuntimeError as error:
            raise DeviceError(f"{self._device} failed: {one_line(error)}") from error

    def wait(self, unless: Callable[[], bool] | None = None) -> None:
        """Wait for the running call, or cancel it; raises as `Pending.wait`."""
        is_cancelled = False
        try:
            while unless is not None and not self._request.wait_for(_PATIENCE):
                if is_cancelled := unless():
                    self._request.cancel()
                    break
            self._request.wait()
        except RuntimeError as error:
            if is_cancelled:
                raise CallCancelled from error
            raise DeviceError(f"{self._device} failed: {one_line(error)}") from error
