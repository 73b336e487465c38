"""Whether others need the machine now, so that long work stops between two steps.

lower_priority()    # of outrider_export.child
distill(options, wait=Others(tell=print, hours=2.0).wait)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from outrider_distill.progress import Stopping

_BUSY = 0.3  # of the processor, by programs of normal priority
_LOOK_EVERY = 5.0  # seconds
_STAT, _SUPPLIES = Path("/proc/stat"), Path("/sys/class/power_supply")


class Others:
    """Waits while others need the machine, and stops when the hours are over.

    hours: of work, without waiting. looks: whether to wait at all. Linux says how busy programs of normal priority are,
    and whether there is power; elsewhere low priority has to do.
    """

    def __init__(self, tell: Callable[[str], None], hours: float = math.inf, *, looks: bool = True) -> None:
        self._tell, self._looks, now = tell, looks, time.monotonic()
        self._end, self._next = now + 3600 * hours, now + _LOOK_EVERY
        self._ticks = _ticks()

    @property
    def is_over(self) -> bool:
        """Whether the hours are."""
        return time.monotonic() > self._end

    def wait(self, stopped: Stopping) -> float:
        """Call this between two steps. Returns the seconds that it has waited."""
        now = began = time.monotonic()
        if self.is_over:
            stopped.stop()
        if not self._looks or began < self._next:
            return 0.0
        while not stopped() and (reason := self._reason()):
            if now == began:
                self._tell(f"Waiting, as {reason}.")
            time.sleep(_LOOK_EVERY)
            now = time.monotonic()
        self._next, self._end = now + _LOOK_EVERY, self._end + now - began
        return now - began

    def _reason(self) -> str:
        """Who needs the machine; "" if nobody does."""
        (user, rest), self._ticks = self._ticks, _ticks()
        user, rest = self._ticks[0] - user, self._ticks[1] - rest
        if any(_says(each, "type", "Battery") and _says(each, "status", "Discharging") for each in _SUPPLIES.glob("*")):
            return "the machine runs on its battery"
        share = user / max(user + rest, 1)
        return f"other programs use {share:.0%} of the processor" if share > _BUSY else ""


def _ticks() -> tuple[int, int]:
    """Time of all processors, of programs of normal priority and the rest, which `lower_priority` makes us part of."""
    try:
        user, *rest = map(int, _STAT.read_text(encoding="ascii").splitlines()[0].split()[1:])
    except (OSError, ValueError):
        return 0, 0
    return user, sum(rest)


def _says(supply: Path, name: str, value: str) -> bool:
    try:
        return (supply / name).read_text(encoding="ascii").strip() == value
    except OSError:
        return False
