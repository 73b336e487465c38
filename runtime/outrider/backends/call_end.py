"""When the calls of an OpenVINO request end, though they may be waited for later."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import openvino as ov


class CallEnd:
    """Says how long a request's call took; by when it was waited for, unless its end is watched."""

    def __init__(self, request: ov.InferRequest) -> None:
        self._request = request
        self._at = [0.0]  # when the last call ended, in seconds of `time.perf_counter`

    def watch(self, wanted: bool) -> None:
        """Have the end of each call noted when it comes; or do not any more."""
        at = self._at  # not more: a request that holds its backend, and is held by it, would stay for ever

        def note(_: object) -> None:
            at[0] = time.perf_counter()

        self._request.set_callback(note if wanted else lambda _: None, None)

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way. One that failed says so to whoever waits for it."""
        try:
            return bool(self._request.wait_for(0))
        except RuntimeError:
            return True

    def seconds_since(self, began: float) -> float:
        """What a call took that began then, and has been waited for."""
        return (self._at[0] if self._at[0] > began else time.perf_counter()) - began
