"""Ctrl-C and SIGTERM as a question that is asked between two steps, so that a checkpoint is whole."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """A context manager; call it to know whether to stop. A second Ctrl-C stops at once.

    with Stopping() as stopped:
        while not stopped(): ...

    On POSIX systems a thread of its own receives the signals. OpenVINO's CPU plugin (2026.4) gives the thread that
    makes a `Core` an alternate signal stack, and with several of them leaves one in place that is freed. Python's
    handlers run on it (SA_ONSTACK), so that a signal in that thread would end the process with a segmentation fault.
    """

    def __init__(self) -> None:
        self._wanted = False
        self._before: dict[int, Any] = {}
        self._mask: Any = None
        self._left = threading.Event()

    def __call__(self) -> bool:
        """Whether to stop."""
        return self._wanted

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python's rule for handlers
            self._before = {each: signal.signal(each, self._stop) for each in _SIGNALS}
            if hasattr(signal, "pthread_sigmask"):
                threading.Thread(target=self._left.wait, daemon=True).start()  # before the mask, which it would inherit
                self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self._left.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._wanted = True
