"""Ctrl-C and SIGTERM: received by a thread without models, and as a question that is asked between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_elsewhere() -> Iterator[None]:
    """On POSIX systems, let a thread of its own receive the signals. Handlers still run in the main thread.

    OpenVINO's CPU plugin (2026.4) gives the thread that makes a `Core` an alternate signal stack, and with several of
    them leaves one in place that is freed. Python's handlers are entered on it (SA_ONSTACK), so that a signal in that
    thread would end the process with a segmentation fault.
    """
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    left = threading.Event()
    threading.Thread(target=left.wait, daemon=True).start()  # before the mask, which it would inherit
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        left.set()


class Stopping:
    """A context manager; call it to know whether to stop, so that a checkpoint is whole. A second Ctrl-C stops at once.

    with Stopping() as stopped:
        while not stopped(): ...
    """

    def __init__(self) -> None:
        self._wanted = False
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Whether to stop."""
        return self._wanted

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python's rule for handlers
            self._before = {each: signal.signal(each, self._stop) for each in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._wanted = True
