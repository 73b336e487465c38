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

    def path(self, points: list[tuple[float, float]], kind: str, *, filled: bool = False) -> None:
        """A line through points, or their polygon."""
        shape, style = ("polygon", "fill") if filled else ("polyline", "stroke")
        self._add(shape, "", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), kind=f"{style} {kind}")

    def dot(self, x: float, y: float, kind: str, title: str) -> None:
        """A mark on a line."""
        self._add("circle", title, cx=x, cy=y, r=4, kind=f"fill {kind}")

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        """A line of text with its middle at y. anchor: the part at x: "start", "middle" or "end"."""
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" dominant-baseline="central" class="{kind}">'
            f"{escape(text)}</text>"
        )

    def markup(self, label: str, style: str = "") -> str:
        """The drawing: an element of a page, or a file with a style sheet of its own. label: a description in words."""
        width, height = f"{self.width:.0f}", f"{self.height:.0f}"
        sheet = f"<style>{style}</style>\n" if style else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" style="max-width:{width}px" role="img" aria-label="{escape(label)}">\n'
            f"{sheet}{chr(10).join(self._shapes)}\n</svg>\n"
        )

    def _add(self, shape: str, title: str, *, kind: str, **positions: float | str) -> None:
        attributes = "".join(
            f' {name}="{value if isinstance(value, str) else format(value, ".1f")}"'
            for name, value in positions.items()
        )
        inside = f"<title>{escape(title)}</title>" if title else ""
        self._shapes.append(f'<{shape}{attributes} class="{kind}">{inside}</{shape}>')
