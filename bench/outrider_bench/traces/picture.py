"""A picture of a few rounds of a trace, as an SVG file."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from outrider.errors import OptionError
from outrider_bench.report.svg import Canvas
from outrider_bench.traces.timeline import Timeline, TraceSpan

WIDTH = 1160.0
_LEFT, _RIGHT, _TOP = 104.0, 16.0, 16.0
_BAR, _GAP = 30.0, 12.0
_TOKEN = 9.0  # a token's square and the space after it
_KINDS = {  # of spans, by name: the class of the style sheet, and what the legend says; in the legend's order
    "check": ("check", "main model verifies"),
    "draft": ("draft", "draft model drafts a token"),
    "read": ("read", "a model reads a prompt, or tokens that it did not draft"),
    "draw": ("draw", "host: draws a draft token"),
    "choose": ("choose", "host: chooses a drafter, and copies"),
    "propose": ("propose", "host: proposes, including draft calls"),
    "draft ahead": ("ahead", "host: drafts while the main model verifies"),
    "submit": ("submit", "host: prepares a call"),
    "verify": ("verify", "host: verifies"),
    "commit": ("commit", "host: commits"),
}
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.strong { font-weight: 600 } .small { font-size: 11px; fill: #57606a } .light { fill: #ffffff; font-size: 11px }
.paper { fill: #ffffff } .grid { stroke: #d8dee4; stroke-width: 1 } .lane { fill: #f3f5f7 }
.check { fill: #0b5cad } .draft { fill: #e69f00 } .read { fill: #8a929c }
.draw { fill: #c2428f } .choose { fill: #4c2f99 } .propose { fill: #8ed0f5 } .ahead { fill: #f2c79b }
.submit { fill: #00a88f } .verify { fill: #d1301f } .commit { fill: #7d6608 }
.round { fill: #ffffff; stroke: #afb8c1; stroke-width: 1 }
.kept { fill: #55a630 } .rejected { fill: #ffffff; stroke: #d1301f; stroke-width: 1.4 } .own { fill: #24292f }
"""


def draw_timeline(timeline: Timeline, *, first: int = 1, count: int = 8) -> str:
    """Rounds `first` to `first + count - 1` of the trace, counted from 1: lanes of requests, devices and the host.

    Raises:
        OptionError: when there are no such rounds.
    """
    rounds = timeline.rounds
    shown = rounds[first - 1 : first - 1 + count]
    if not rounds:
        raise OptionError("There is no round of decoding in this trace, so there is nothing to draw.")
    if not shown or first < 1:
        raise OptionError(f"There is no round {first} in this trace, which has {len(rounds)}. Name an earlier one.")
    began, ended = min(span.began for span in shown), max(span.ended for span in shown)
    spans = [span for span in timeline.spans if span.ended > began and span.began < ended]
    lanes = [lane for kind in ("request", "device", "host") for lane in _lanes(spans, kind)]
    canvas = Canvas(WIDTH, _TOP + (_BAR + _GAP) * len(lanes) + 84)
    canvas.rect(0, 0, WIDTH, canvas.height, "paper")
    drawing = _Drawing(canvas, began, ended)
    bottom = _TOP + (_BAR + _GAP) * len(lanes)
    drawing.axis(bottom)
    for i, lane in enumerate(lanes):
        y = _TOP + (_BAR + _GAP) * i
        canvas.text(_LEFT - 10, y + _BAR / 2, lane, "end", "strong")
        for span in spans:
            if span.lane == lane:
                drawing.span(span, y)
    _legend(canvas, {span.name for span in spans if span.kind != "request"}, bottom + 34)
    last = min(first + count - 1, len(rounds))
    return canvas.markup(f"rounds {first} to {last} of a trace: what devices and host did", _STYLE)


def _lanes(spans: Sequence[TraceSpan], kind: str) -> list[str]:
    return sorted({span.lane for span in spans if span.kind == kind}, key=lambda lane: (lane[:4] != "main", lane))


class _Drawing:
    """Seconds `began` to `ended` on a canvas."""

    def __init__(self, canvas: Canvas, began: float, ended: float) -> None:
        self._canvas, self._began, self._ended = canvas, began, ended

    def x(self, at: float) -> float:
        """Where a moment is, within the drawing."""
        at = min(max(at, self._began), self._ended)
        return _LEFT + (at - self._began) / ((self._ended - self._began) or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def axis(self, bottom: float) -> None:
        """Milliseconds, and lines through all lanes."""
        milliseconds = 1e3 * (self._ended - self._began)
        steps = (factor * 10**power for power in itertools.count() for factor in (1, 2, 5))
        step = next(step for step in steps if milliseconds / step <= 12)
        for tick in range(0, int(milliseconds) + 1, step):
            x = self.x(self._began + tick / 1e3)
            self._canvas.line(x, _TOP - 8, x, bottom, "grid")
            self._canvas.text(x, bottom + 8, f"{tick} ms" if not tick else str(tick), "middle", "small")

    def span(self, span: TraceSpan, y: float) -> None:
        """What a lane at y shows: of a request its rounds, else bars; the host's waiting stays blank."""
        if span.name == "round":
            self._round(span, y)
        elif span.name in _KINDS and span.kind != "request":
            self._bar(span, y)

    def _bar(self, span: TraceSpan, y: float) -> None:
        x, kind = self.x(span.began), _KINDS[span.name][0]
        width = self.x(span.ended) - x
        figures = ", ".join(f"{name} {value}" for name, value in span.args.items())
        title = f"{span.name}: {1e3 * span.seconds:.2f} ms, {figures}".removesuffix(", ")
        if span.name in ("propose", "draft ahead"):  # a line under what lies in it
            self._canvas.rect(x, y + _BAR - 5, width, 5, kind, title)
            return
        self._canvas.rect(x, y, width, _BAR - (7 if span.kind == "host" else 0), kind, title)
        if span.name == "check" and width > 50:
            rows = span.args["rows"]
            self._canvas.text(x + width / 2, y + _BAR / 2, "1 row" if rows == 1 else f"{rows} rows", "middle", "light")

    def _round(self, span: TraceSpan, y: float) -> None:
        """A request's round: its draft tokens, kept or rejected, and the main model's own."""
        drafted, accepted, tokens = (span.args[name] for name in ("drafted", "accepted", "tokens"))
        x, width = self.x(span.began), self.x(span.ended) - self.x(span.began)
        title = f"{accepted} of {drafted} draft tokens accepted, {tokens} tokens, {1e3 * span.seconds:.1f} ms"
        self._canvas.rect(x + 0.5, y, max(width - 1, 1), _BAR, "round", title)
        # The main model's own token stands where the first rejected one was.
        kinds = ["kept"] * accepted + ["own"] * (tokens - accepted) + ["rejected"] * (drafted - accepted)
        size = min(_TOKEN, (width - 6) / max(len(kinds), 1))
        if size < 2:
            return
        for i, kind in enumerate(kinds):
            left = x + (width - size * len(kinds)) / 2 + i * size
            self._canvas.rect(left, y + (_BAR - size) / 2, size - 1.6, size - 1.6, kind)


def _legend(canvas: Canvas, names: set[str], y: float) -> None:
    """What the colours mean: tokens first, then bars."""
    tokens = {"kept": "draft token, accepted", "rejected": "rejected", "own": "the main model's own token"}
    entries = list(tokens.items())
    entries += [(kind, label) for name, (kind, label) in _KINDS.items() if name in names]
    x = _LEFT
    for kind, label in entries:
        if x + 20 + 6.4 * len(label) > WIDTH - _RIGHT:
            x, y = _LEFT, y + 20
        canvas.rect(x, y - 5, 10, 10, kind)
        canvas.text(x + 16, y, label, "start", "small")
        x += 34 + 6.2 * len(label)
