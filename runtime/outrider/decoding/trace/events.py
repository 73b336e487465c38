"""The file of a trace.

The format is the JSON array of Google's "Trace Event Format", with one event per line. The array's end may be missing,
so viewers open the file of a program that died. It lacks the events of the last half second.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import numpy as np

from outrider.errors import OptionError, OutriderError, one_line

_FLUSH_SECONDS = 0.5  # seconds between writes; a program that dies loses events of this time


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of the timeline, by the numbers that the format calls process and thread."""

    pid: int
    tid: int


WORK, REQUESTS = 1, 2  # groups of lanes


class TraceFile:
    """A file that events are written to, in a thread of its own.

        trace = TraceFile(Path("out.json"))
        lane = trace.lane("main: CPU")
        trace.span(lane, "device", "check", began, ended, rows=4)    # times as `time.perf_counter` has them
        trace.close()

    Events may come from any thread, also while the file is closed: then they are ignored, and spans that have begun end
    there. Nothing takes a lock, because Ctrl-C may interrupt it anywhere. labels: shown beside the timeline, such as
    the models' devices.

    Raises:
        OptionError: when the file cannot be written.
    """

    def __init__(self, path: Path, labels: Iterable[str] = ()) -> None:
        self.path = path
        try:
            self._file = path.open("wb")
        except (OSError, ValueError) as error:  # or a name that is no text
            raise OptionError(f"Trace {path} cannot be written: {one_line(error)}. Name another file.") from error
        self._zero = time.perf_counter()
        self._events: deque[dict[str, Any]] = deque()
        self._end: SimpleQueue[None] = SimpleQueue()
        self._takes_more = True
        self._begun: dict[tuple[int, str], dict[str, Any]] = {}  # the writer thread's: spans that have not ended
        self._failure: Exception | None = None
        self._tids = itertools.count(10)
        for pid, name in ((WORK, "outrider"), (REQUESTS, "requests")):
            self._name("process_name", Lane(pid, 0), name=name)
            self._name("process_sort_index", Lane(pid, 0), sort_index=pid)
        self._name("process_labels", Lane(WORK, 0), labels="; ".join(labels))
        self._writer = threading.Thread(target=self._write, name="outrider-trace", daemon=True)
        self._writer.start()

    def stop(self) -> None:
        """Ignore events from now on, except the ends of spans that have begun."""
        self._takes_more = False

    def close(self) -> None:
        """Write what is left, and end the file.

        Raises:
            OptionError: when the file cannot be written, as on a full disk.
            OutriderError: when an event cannot be converted to JSON.
        """
        self.stop()
        self._end.put(None)
        self._writer.join()
        if self._failure:
            what = f"Trace {self.path} is cut short: {one_line(self._failure)}."
            if isinstance(self._failure, OSError):
                raise OptionError(f"{what} Name a file where there is room.") from self._failure
            raise OutriderError(f"{what} The answers are complete; only the trace is not.") from self._failure

    def lane(self, name: str, group: int = WORK) -> Lane:
        """A new row of the timeline."""
        lane = Lane(group, next(self._tids))
        self._name("thread_name", lane, name=name)
        self._name("thread_sort_index", lane, sort_index=lane.tid)
        return lane

    def span(self, lane: Lane, kind: str, name: str, began: float, ended: float, **args: Any) -> None:
        """Add a span that has ended. In one lane, spans do not overlap, but may lie within one of `begin`."""
        at = self._micros(began)
        self._add("X", lane, name, ts=at, dur=max(self._micros(ended) - at, 0), cat=kind, args=args)

    def begin(self, lane: Lane, kind: str, name: str, at: float, **args: Any) -> None:
        """Begin a span that others may lie within; see `end`. One at a time in each lane."""
        self._add("B", lane, name, ts=self._micros(at), cat=kind, args=args)

    def end(self, lane: Lane, name: str, at: float, **args: Any) -> None:
        """End the span that `begin` began in a lane. The viewer wants its name again.

        Works after `stop` too. Ignored if the span has not begun.
        """
        self._events.append(_event("E", lane, name, ts=self._micros(at), args=args))

    def count(self, name: str, at: float, **values: float) -> None:
        """Set counters to these values from this time on."""
        self._add("C", Lane(REQUESTS, 0), name, ts=self._micros(at), args=values)

    def _micros(self, at: float) -> int:
        """Microseconds since the trace's begin. Rounded once, so that adjacent spans share a time."""
        return max(round((at - self._zero) * 1e6), 0)

    def _name(self, what: str, lane: Lane, **args: Any) -> None:
        self._add("M", lane, what, ts=0, args=args)

    def _add(self, phase: str, lane: Lane, name: str, **more: Any) -> None:
        if self._takes_more:
            self._events.append(_event(phase, lane, name, **more))

    def _write(self) -> None:
        """Write events in batches, so that the threads that add them do not wait for the disk."""
        separator, ended = b"[\n", False
        encode = msgspec.json.Encoder(enc_hook=_plain).encode
        try:
            with self._file as file:
                while not ended:
                    with contextlib.suppress(Empty):
                        self._end.get(timeout=_FLUSH_SECONDS)
                        ended = True
                    if lines := [encode(event) for event in self._taken(last=ended)]:
                        file.write(separator + b",\n".join(lines))
                        file.flush()  # whole lines
                        separator = b",\n"
                file.write(b"\n]\n")
        except Exception as error:  # perhaps the disk is full, which must not end an answer
            self._failure, self._takes_more = error, False

    def _taken(self, *, last: bool) -> Iterator[dict[str, Any]]:
        """The events since the last batch. last: also end the spans that have not ended."""
        for _ in range(len(self._events)):
            event = self._events.popleft()
            key = event["tid"], event["name"]
            if event["ph"] == "B":
                self._begun[key] = event
            elif event["ph"] == "E" and self._begun.pop(key, None) is None:
                continue
            yield event
        now = self._micros(time.perf_counter())
        for event in self._begun.values() if last else ():
            yield event | {"ph": "E", "ts": now, "args": {}}


def _event(phase: str, lane: Lane, name: str, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": lane.pid, "tid": lane.tid, "name": name, **more}


def _plain(value: object) -> int | float:
    """Convert a NumPy number, which an app may pass as an option, to a Python number."""
    if isinstance(value, np.integer | np.floating):
        return value.item()
    raise NotImplementedError(f"{value!r} is no number")
