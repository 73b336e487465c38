"""The report's plots, from the figures of `outrider_bench.report.summary`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outrider_bench.report.svg import Canvas

WIDTH = 900.0
NUM_COLOURS = 8
PARTS = {"draft": "drafting", "check": "target passes", "host": "all else on the host"}
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


def plot_time(profile: Mapping[str, Mapping[str, Any]]) -> str:
    """For each mode, the milliseconds that a token takes, in drafting, target passes and all else."""
    if not profile:
        return ""
    bar, left, right = 30.0, 150.0, 90.0
    totals = {mode: sum(one["milliseconds_per_token"].values()) for mode, one in profile.items()}
    scale = (WIDTH - left - right) / (max(totals.values()) or 1.0)
    canvas = Canvas(WIDTH, bar * len(profile) + 6)
    for i, (mode, one) in enumerate(profile.items()):
        x, y = left, bar * i + 3
        canvas.text(left - 8, y + bar / 2, mode, "end")
        for part, label in PARTS.items():
            milliseconds = one["milliseconds_per_token"][part]
            width = milliseconds * scale
            canvas.rect(x, y + 3, width, bar - 6, f"part-{part}", f"{mode}, {label}: {milliseconds:.2f} ms a token")
            if width > 44:
                canvas.text(x + width / 2, y + bar / 2, f"{milliseconds:.1f}", "middle", f"small on-{part}")
            x += width
        canvas.text(x + 6, y + bar / 2, f"{totals[mode]:.1f} ms", "start", "small")
    return canvas.markup("milliseconds of decoding per token: drafting, target passes, host")


def plot_lengths(mode: str, one: Mapping[str, Any], modes: Sequence[str], longest_draft: float) -> str:
    """A mode's mean draft length, round by round, and the accepted part of it.

    Over answers with so many rounds, while these are at least a third of all. longest_draft: where the scale ends.
    """
    answers = one["answers_by_round"]
    num_rounds = sum(1 for count in answers if 3 * count >= answers[0])
    width, height, left, top, bottom = 430.0, 150.0, 34.0, 22.0, 34.0
    canvas = Canvas(width, height)

    def points(values: Sequence[float]) -> list[tuple[float, float]]:
        """The edges of steps, one per round."""
        wide = (width - left - 12) / num_rounds
        return [(left + (i + edge) * wide, y(value)) for i, value in enumerate(values[:num_rounds]) for edge in (0, 1)]

    def y(tokens: float) -> float:
        return top + (1 - tokens / longest_draft) * (height - top - bottom)

    canvas.text(left, 8, mode, "start", "strong")
    for tokens in sorted({0, round(longest_draft / 2), round(longest_draft)}):
        canvas.line(left, y(tokens), width - 12, y(tokens), "grid")
        canvas.text(left - 6, y(tokens), str(tokens), "end", "small")
    kind = colour(modes, mode)
    accepted = points(one["accepted_by_round"])
    canvas.path([(left, y(0)), *accepted, (accepted[-1][0], y(0))], f"{kind} soft", filled=True)
    canvas.path(points(one["drafted_by_round"]), kind)
    canvas.text(left, height - 21, "1", "middle", "small")
    canvas.text(width - 12, height - 21, str(num_rounds), "end", "small")
    canvas.text((left + width) / 2, height - 8, "round", "middle", "small")
    return canvas.markup(f"draft length over rounds, {mode}")


def _interval(row: Mapping[str, Any], figure: str) -> Sequence[float] | None:
    """A speed-up's interval, cut to what can be drawn. Two repeats may give a very wide one."""
    interval: Sequence[float] | None = row.get(f"{figure}_interval")
    if not interval:
        return None
    return max(interval[0], row[figure] / 2), min(interval[1], row[figure] * 2)
