"""A curve with its axes, as SVG."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH, _HEIGHT = 640, 200
_LEFT, _BOTTOM, _TOP = 70, 30, 12  # room for the labels
_TICKS = 5
_MOST = 400  # points; more are thinned out


def curve(name: str, axis: str, xs: Sequence[float], ys: Sequence[float]) -> str:
    """A figure of `ys` by `xs`, which ascend; empty for fewer than two points. axis: what the xs are."""
    if len(xs) < 2:
        return ""
    every = -(-len(xs) // _MOST)
    points = [*list(zip(xs, ys, strict=True))[:-1:every], (xs[-1], ys[-1])]
    low, high = min(ys), max(*ys, min(ys) + 1e-9)
    right = max(xs[-1], 1e-9)

    def across(x: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 30) * x / right

    def down(y: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * (y - low) / (high - low)

    shares = [i / (_TICKS - 1) for i in range(_TICKS)]
    drawn = "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH - 30}" y1="{down(y):.1f}" y2="{down(y):.1f}" stroke="#8884"/>'
        f'<text x="{_LEFT - 8}" y="{down(y) + 4:.1f}" text-anchor="end">{_number(y, high - low)}</text>'
        for y in (low + share * (high - low) for share in shares)
    )
    drawn += "".join(
        f'<text x="{across(x):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{_number(x, right)}</text>'
        for x in (share * right for share in shares)
    )
    line = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in points)
    return (
        f"<figure><figcaption>{html.escape(name)}, by {html.escape(axis)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-size="12" fill="#666">{drawn}'
        f'<polyline fill="none" stroke="#3f51b5" stroke-width="2" points="{line}"/></svg></figure>'
    )


def _number(value: float, span: float) -> str:
    """With as many digits as the axis needs."""
    return f"{value:,.0f}" if span >= _TICKS - 1 else f"{value:.2g}" if span < 0.1 else f"{value:.2f}"
