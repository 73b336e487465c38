"""The report's plots, from the figures of `outrider_bench.report.summary`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH = 900.0
NUM_COLOURS = 8
_TICKS = (0.125, 0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 16.0)


def colour(modes: Sequence[str], mode: str) -> str:
    """A mode's colour, as a class of the style sheet; the same in all plots."""
    return f"s{modes.index(mode) % NUM_COLOURS}"


def plot_ratios(rows: Sequence[Mapping[str, Any]], modes: Sequence[str], reference: str, figure: str) -> str:
    """Bars from 1 to the right for faster and to the left for slower, on a logarithmic scale, by category.

    figure: "speed_up", with whiskers for its interval where there is one, or "end_to_end".
    """
    shown = [row for row in rows if row["mode"] != reference and row[figure]]
    if not shown:
        return ""
    categories = list(dict.fromkeys(row["category"] for row in shown))
    compared = [mode for mode in modes if mode != reference]
    bar, gap, top, left, right = 15, 12, 26, 130, 60
    values = [1.0]
    for row in shown:
        values += [row[figure], *(_interval(row, figure) or ())]
    low, high = math.log(min(values) * 0.93), math.log(max(values) * 1.07)
    low, high = min(low, math.log(0.8)), max(high, math.log(1.25))
    height = top + bar * len(shown) + gap * len(categories)
    canvas = Canvas(WIDTH, height)

    def x(ratio: float) -> float:
        return left + 50 + (math.log(ratio) - low) / (high - low) * (WIDTH - left - 50 - right)

    for tick in _TICKS:
        if low <= math.log(tick) <= high:
            canvas.line(x(tick), top - 6, x(tick), height - gap / 2, "one" if tick == 1 else "grid")
            canvas.text(x(tick), 9, f"{tick:g}×", "middle", "small")
    y: float = top
    for category in categories:
        rows_here = [row for mode in compared for row in shown if (row["mode"], row["category"]) == (mode, category)]
        canvas.text(left - 8, y + bar * len(rows_here) / 2, category, "end", "strong" if category == "all" else "")
        for row in rows_here:
            end = x(row[figure])
            interval = _interval(row, figure)
            title = f"{row['mode']}, {category}: {row[figure]:.2f}×"
            if interval:
                title += f" ({interval[0]:.2f} to {interval[1]:.2f})"
            canvas.rect(min(end, x(1)), y + 1.5, abs(end - x(1)), bar - 3, colour(modes, row["mode"]), title)
            first, last = (x(interval[0]), x(interval[1])) if interval else (end, end)
            if interval:
                canvas.line(first, y + bar / 2, last, y + bar / 2, "whisker")
            slower = row[figure] < 1
            edge = min(first, end) - 5 if slower else max(last, end) + 5
            canvas.text(edge, y + bar / 2, f"{row[figure]:.2f}", "end" if slower else "start", "small")
            y += bar
        y += gap
    return canvas.markup(f"{figure} against {reference}, by category and mode")


def plot_acceptance(profile: Mapping[str, Mapping[str, Any]], modes: Sequence[str]) -> str:
    """For each mode, the share of drafts whose token at a position was accepted."""
    shown = {mode: one["accepted_by_position"] for mode, one in profile.items() if one["accepted_by_position"]}
    if not shown:
        return ""
    longest = max(map(len, shown.values()))
    left, top, bottom, height = 60.0, 14.0, 40.0, 300.0
    canvas = Canvas(WIDTH, height)

    def x(position: int) -> float:
        return left + 20 + (position - 1) / max(longest - 1, 1) * (WIDTH - left - 50)

    def y(share: float) -> float:
        return top + (1 - share) * (height - top - bottom)

    for percent in (0, 25, 50, 75, 100):
        canvas.line(left, y(percent / 100), WIDTH - 20, y(percent / 100), "grid")
        canvas.text(left - 8, y(percent / 100), f"{percent}%", "end", "small")
    step = max(1, math.ceil(longest / 20))
    for position in range(1, longest + 1, step):
        canvas.text(x(position), height - 28, str(position), "middle", "small")
    canvas.text((left + WIDTH) / 2, height - 9, "position in the draft", "middle", "small")
    for mode, shares in shown.items():
        kind = colour(modes, mode)
        points = [(x(i), y(share)) for i, share in enumerate(shares, 1)]
        canvas.path(points, kind)
        for i, (point, share) in enumerate(zip(points, shares, strict=True), 1):
            canvas.dot(*point, kind, f"{mode}, position {i}: {share:.0%} of drafts")
    return canvas.markup("share of drafts whose token was accepted, by position")


def _interval(row: Mapping[str, Any], figure: str) -> Sequence[float] | None:
    """A speed-up's interval, cut to what can be drawn. Two repeats may give a very wide one."""
    interval: Sequence[float] | None = row.get(f"{figure}_interval")
    if not interval:
        return None
    return max(interval[0], row[figure] / 2), min(interval[1], row[figure] * 2)


class Canvas:
    """A drawing of so many pixels, as SVG; x goes right, y goes down.

    Colours come from the style sheet of the page, by class, so that they follow its light or dark scheme.
    """

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._shapes: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str, title: str = "") -> None:
        """A filled rectangle. `title` is its tooltip."""
        self._add("rect", title, x=x, y=y, width=max(width, 0.5), height=height, kind=f"fill {kind}")

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """A straight line."""
        self._add("line", "", x1=x1, y1=y1, x2=x2, y2=y2, kind=kind)

    def path(self, points: list[tuple[float, float]], kind: str) -> None:
        """A line through points."""
        self._add("polyline", "", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), kind=f"stroke {kind}")

    def dot(self, x: float, y: float, kind: str, title: str) -> None:
        """A mark on a line."""
        self._add("circle", title, cx=x, cy=y, r=4, kind=f"fill {kind}")

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        """A line of text with its middle at y. anchor: the part at x: "start", "middle" or "end"."""
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" dominant-baseline="central" class="{kind}">'
            f"{escape(text)}</text>"
        )

    def markup(self, label: str) -> str:
        """The drawing, an element of a page. label: a description in words."""
        width, height = f"{self.width:.0f}", f"{self.height:.0f}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" style="max-width:{width}px" role="img" aria-label="{escape(label)}">\n'
            f"{chr(10).join(self._shapes)}\n</svg>\n"
        )

    def _add(self, shape: str, title: str, *, kind: str, **positions: float | str) -> None:
        attributes = "".join(
            f' {name}="{value if isinstance(value, str) else format(value, ".1f")}"'
            for name, value in positions.items()
        )
        inside = f"<title>{escape(title)}</title>" if title else ""
        self._shapes.append(f'<{shape}{attributes} class="{kind}">{inside}</{shape}>')
