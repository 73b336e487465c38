"""When the calls of an OpenVINO request end. The wait for a call may come later."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import openvino as ov


class CallEnd:
    """Measures how long a request's calls take: until the end if that is watched, otherwise until `wait` returns."""

    def __init__(self, request: ov.InferRequest) -> None:
        self._request = request
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
