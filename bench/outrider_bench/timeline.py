"""What a trace says: where the time of decoding went."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import msgspec

from outrider.errors import OptionError
from outrider.system.files import reading, why

# What no trace goes beyond: three years, and more tokens than a round has.
_Micros = Annotated[float, msgspec.Meta(ge=-1e14, le=1e14)]
_Duration = Annotated[float, msgspec.Meta(ge=0, le=1e14)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=100_000)]


@dataclass(slots=True)
class TraceSpan:
    """Something that took time, in seconds from the trace's begin.

    kind: "device", "host" or "request". depth: how many others of its lane it lies in. args: its figures.
    """

    lane: str
    kind: str
    name: str
    began: float
    ended: float
    args: dict[str, Any] = field(default_factory=dict)
    depth: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


@dataclass(slots=True)
class Timeline:
    """A trace's spans in the order in which they began, and whether it has its end."""

    spans: list[TraceSpan]
    is_whole: bool

    def of(self, kind: str, *names: str) -> list[TraceSpan]:
        """Those of a kind, and of these names if any are given."""
        return [span for span in self.spans if span.kind == kind and (not names or span.name in names)]

    @property
    def rounds(self) -> list[TraceSpan]:
        """The rounds of all requests, as they ended."""
        return sorted(self.of("request", "round"), key=lambda span: span.ended)


def read_timeline(path: Path) -> Timeline:
    """A trace from its file; one that was cut off has what was written.

    Raises:
        OptionError: when the file cannot be read, or is none of ours.
    """
    with reading(f"Trace {path}"):
        lines = path.read_bytes().splitlines()
    foreign = OptionError(f"{path} is not a trace of Outrider's. Write one with: outrider generate … --trace {path}")
    decode = msgspec.json.Decoder(_Event).decode
    events = []
    for i, line in enumerate(lines[1:], 2):
        if line == b"]":
            break
        try:
            events.append(decode(line.removesuffix(b",")))
        except msgspec.ValidationError as error:
            raise foreign from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if i == len(lines):
                break
            raise OptionError(f"{path}, line {i}, is no event of a trace: {why(error)}.") from error
    if not events or lines[0] != b"[":
        raise foreign
    try:
        timeline = Timeline(_spans(events), is_whole=lines[-1] == b"]")
        for span in timeline.rounds:
            msgspec.convert(span.args, _Round)
    except (KeyError, msgspec.ValidationError) as error:  # a lane without a name, or a span that lacks what it says
        raise foreign from error
    return timeline


class _Event(msgspec.Struct):
    """A line of the file, as `outrider.decoding.trace.events` writes it: ts and dur in microseconds."""

    ph: str
    pid: int
    tid: int
    name: str
    ts: _Micros
    dur: _Duration = 0.0
    cat: str = ""
    args: dict[str, Any] = msgspec.field(default_factory=dict)


class _Round(msgspec.Struct):
    tokens: _Count
    drafted: _Count
    accepted: _Count


def _spans(events: Sequence[_Event]) -> list[TraceSpan]:
    """Spans from events; what has not ended ends with the last event.

    Raises:
        KeyError: when something is missing.
    """
    lanes: dict[tuple[int, int], str] = {}
    names: dict[str, int] = defaultdict(int)
    opened: dict[tuple[int, int], list[TraceSpan]] = defaultdict(list)
    found = []
    last = max(event.ts + event.dur for event in events) / 1e6
    for event in events:
        key, at = (event.pid, event.tid), event.ts / 1e6
        if event.ph == "M" and event.name == "thread_name":
            name = str(event.args["name"])
            names[name] += 1
            lanes[key] = name if names[name] == 1 else f"{name} {names[name]}"
        elif event.ph == "X":
            found.append(TraceSpan(lanes[key], event.cat, event.name, at, (event.ts + event.dur) / 1e6, event.args))
        elif event.ph == "B":
            span = TraceSpan(lanes[key], event.cat, event.name, at, last, event.args)
            opened[key].append(span)
            found.append(span)
        elif event.ph == "E" and opened[key]:
            span = opened[key].pop()
            span.ended = at
            span.args |= event.args
    found.sort(key=lambda span: (span.began, -span.ended))
    around: dict[str, list[TraceSpan]] = defaultdict(list)
    for span in found:
        outer = around[span.lane]
        while outer and outer[-1].ended <= span.began:
            outer.pop()
        span.depth = len(outer)
        outer.append(span)
    return found


def summarise(timeline: Timeline) -> dict[str, Any]:
    """Where the time went from the first round's begin to the last one's end, while any request was decoding.

    seconds: of decoding. devices: of each, its calls, their mean milliseconds, and the share of the time in which it
    was busy. both: the share in which two were. host: the share in which none was, by what the host did; "between" is
    what has no name. host_milliseconds: of that, for a call of the main model. gap_milliseconds: between two calls in a
    row that draft, the median.
    """
    rounds = timeline.rounds
    shares: dict[tuple[int, str], float] = defaultdict(float)
    calls: dict[str, list[TraceSpan]] = defaultdict(list)  # by device
    busy: dict[str, float] = defaultdict(float)
    for seconds, active in _stretches([*rounds, *timeline.of("device"), *timeline.of("host")]):
        if not any(span.kind == "request" for span in active):
            continue
        running = [span for span in active if span.kind == "device"]
        for span in running:
            busy[span.lane] += seconds
            if span not in calls[span.lane][-1:]:
                calls[span.lane].append(span)
        inner = max((span for span in active if span.kind == "host"), key=lambda span: span.depth, default=None)
        shares[len({span.lane for span in running}), inner.name if inner else "between"] += seconds
    total = sum(shares.values())
    devices = {
        lane: {
            "calls": len(mine),
            "milliseconds": 1e3 * fmean(span.seconds for span in mine),
            "share": busy[lane] / total,
        }
        for lane, mine in calls.items()
    }
    num_checks = sum(device["calls"] for lane, device in devices.items() if lane.startswith("main"))
    idle = sum(seconds for (num_busy, _), seconds in shares.items() if not num_busy)
    while_idle = {name: seconds / total for (num_busy, name), seconds in shares.items() if not num_busy}
    return {
        "seconds": total,
        "rounds": len(rounds),
        "tokens": sum(span.args["tokens"] for span in rounds),
        "drafted": sum(span.args["drafted"] for span in rounds),
        "accepted": sum(span.args["accepted"] for span in rounds),
        "devices": devices,
        "both": sum(seconds for (num_busy, _), seconds in shares.items() if num_busy > 1) / (total or 1.0),
        "host": dict(sorted(while_idle.items(), key=lambda item: -item[1])),
        "host_milliseconds": 1e3 * idle / max(num_checks, 1),
        "gap_milliseconds": 1e3 * median(gaps) if (gaps := _gaps(timeline)) else None,
        "is_whole": timeline.is_whole,
    }


def _gaps(timeline: Timeline) -> list[float]:
    """Seconds between the draft model's calls of one draft."""
    drafts = timeline.of("device", "draft")
    begins = [span.began for span in drafts]
    found = []
    for proposal in timeline.of("host", "propose"):
        begun = drafts[bisect_left(begins, proposal.began) : bisect_right(begins, proposal.ended)]
        inside = [span for span in begun if span.ended <= proposal.ended]
        found += [after.began - before.ended for before, after in pairwise(inside)]
    return found


def _stretches(spans: Sequence[TraceSpan]) -> Iterator[tuple[float, list[TraceSpan]]]:
    """Seconds in which the same spans go on, and which."""
    long = [(i, span) for i, span in enumerate(spans) if span.ended > span.began]
    edges = sorted([(span.began, 1, i) for i, span in long] + [(span.ended, 0, i) for i, span in long])
    active: dict[int, TraceSpan] = {}
    before = 0.0
    for at, begins, i in edges:
        if at > before and active:
            yield at - before, list(active.values())
        before = at
        if begins:
            active[i] = spans[i]
        else:
            del active[i]
