"""A few shapes, as SVG text.

    canvas = Canvas(400, 100)
    canvas.rect(0, 10, 80, 12, "s0", title="1.42×")
    canvas.markup("Speed-up by category")

Colours come from the style sheet of the page, by class, so that they follow its light or dark scheme.
"""

from __future__ import annotations

from html import escape


class Canvas:
    """A drawing of so many pixels; x goes right, y goes down."""

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

    def area(self, points: list[tuple[float, float]], kind: str) -> None:
        """The polygon of points."""
        self._add("polygon", "", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), kind=f"fill {kind}")

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
        """The drawing as an element of a page. label: a description in words."""
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" style="max-width:{self.width:.0f}px" '
            f'role="img" aria-label="{escape(label)}">{"".join(self._shapes)}</svg>'
        )

    def document(self, label: str, style: str) -> str:
        """The drawing as a separate file with its own style sheet."""
        shapes = "\n".join(self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
            f'width="{self.width:.0f}" height="{self.height:.0f}" role="img" aria-label="{escape(label)}">\n'
            f"<style>{style}</style>\n{shapes}\n</svg>\n"
        )

    def _add(self, shape: str, title: str, *, kind: str, **positions: float | str) -> None:
        attributes = "".join(
            f' {name}="{value if isinstance(value, str) else format(value, ".1f")}"'
            for name, value in positions.items()
        )
        inside = f"<title>{escape(title)}</title>" if title else ""
        self._shapes.append(f'<{shape}{attributes} class="{kind}">{inside}</{shape}>')
