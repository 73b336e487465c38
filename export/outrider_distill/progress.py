"""How a distillation goes on: lines for the terminal, and an end by Ctrl-C or SIGTERM.

live = Live(plan.lines(), tell=print)
live.stage("Writing data")
write_data(..., progress=live.wrote)
fit(..., watch=live)
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, Self

from outrider.drafters.prediction import Costs, predict
from outrider_distill.answers import DataProgress
from outrider_distill.train.status import TrainingStatus, Watch

_LINE_EVERY = 300.0  # seconds


class Live(Watch):
    """Shows where the work is. A `Watch` of training.

    lines: the plan. tell: prints a line. status: shows a line in place of the one before;
    None: it is told now and then. costs: for the expected speed-up.
    """

    def __init__(
        self, lines: Sequence[str], tell: Callable[[str], None], status: Callable[[str], None] | None = None
    ) -> None:
        self._facts = dict[str, str]()
        self._told = 0.0
        self.tell, self._status = tell, status
        self.costs: Costs | None = None
        for line in lines:
            tell(line)

    def stage(self, title: str) -> None:
        """Begin a stage."""
        self._facts = {}
        self._told = time.monotonic()
        if self._status is not None:
            self._status("")
        self.tell(title)

    def wrote(self, state: DataProgress) -> None:
        """Data has been written."""
        left, is_done = state.seconds_left, state.num_safe >= state.num_wanted
        speed = state.num_written / max(state.seconds, 1)
        kept = f"{state.num_tokens:,}" if is_done else f"{state.num_tokens:,} of about {state.num_expected:,}"
        self._facts = {"tokens kept": kept, "conversations": f"{state.num_conversations:,}"}
        if not is_done:
            self._facts = {
                "time left": "not known yet" if left is None else _duration(left),
                **self._facts,
                "now": "writing answers" if state.is_asking else "writing prompts",
                "tokens written in this run": f"{state.num_written:,}, {speed:.0f} per second",
            }
        self._say(at_once=is_done, stays=is_done)

    def stepped(self, status: TrainingStatus) -> None:
        """See `Watch`."""
        self._facts |= {
            "time left": _duration(status.seconds_left),
            "step": f"{status.step:,} of {status.num_steps:,}, epoch {status.epoch}",
            "loss": f"{status.loss:.3f}",
            "tokens": f"{status.num_tokens:,}",
        }
        self._say()

    def evaluated(self, status: TrainingStatus) -> None:
        """See `Watch`."""
        last = status.evaluations[-1]
        self._facts |= {
            "acceptance by position": " ".join(f"{each:.0%}" for each in last.acceptance),
            "tokens per round": f"{last.tokens_per_round:.2f}",
        }
        if self.costs is not None:
            found = predict(last.acceptance, self.costs)
            self._facts["expected here"] = f"{found.speed_up:.2f}× with {found.num_draft_tokens} draft tokens"
        self._say(at_once=True)

    def _say(self, *, at_once: bool = False, stays: bool = False) -> None:
        now, line = time.monotonic(), ", ".join(f"{name} {value}" for name, value in self._facts.items())
        if self._status is not None and not stays:
            self._status(line)
        elif at_once or now - self._told > _LINE_EVERY:
            self._told = now
            self.tell(line)


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds, such as 1:05:00."""
    return str(timedelta(seconds=round(min(max(seconds, 0), 1e9))))


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

    def stop(self) -> None:
        """Ask for it, as a signal does."""
        self._wanted = True

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
