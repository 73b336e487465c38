"""The commands' output."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

# Without a terminal, each sentence and each row is one line.
_WIDTH = shutil.get_terminal_size((0, 24)).columns
out = Console(markup=False, emoji=False, highlight=False, soft_wrap=not _WIDTH, width=_WIDTH or 160)
err = Console(stderr=True, markup=False, emoji=False, highlight=False)
_SECONDS_A_LINE = 15.0  # between lines of progress, without a terminal


def print_json(value: Any) -> None:
    """One JSON object on standard output, numbers to six significant digits."""
    json.dump(_rounded(value), sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")


class _FittingTable(Table):
    """A table that is turned on its side, or written row by row, where its columns do not fit beside each other."""

    heading: str | None = None  # a line before it, which may be longer than its lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.heading:
            yield Text(self.heading, "bold")
        if self.fits(options.max_width):
            yield from super().__rich_console__(console, options)
            return
        turned = self._turned()
        if turned.fits(options.max_width):
            yield from Table.__rich_console__(turned, console, options)
            return
        for i in range(self.row_count):
            if i:
                yield from console.render("", options)
            yield from Table.__rich_console__(self._row(i), console, options)

    def fits(self, width: int) -> bool:
        """Whether its columns, with their words whole, stand beside each other in so many cells."""
        return sum(self._narrowest()) + 2 * (len(self.columns) - 1) <= width

    def _narrowest(self) -> list[int]:
        """The width of each column at which its words stay whole."""
        texts = ([str(column.header), *map(str, column.cells)] for column in self.columns)
        return [
            max(
                cell_len(part)
                for text in found
                for part in (text.splitlines() if column.no_wrap else text.split()) or [""]
            )
            for column, found in zip(self.columns, texts, strict=True)
        ]

    def _turned(self) -> _FittingTable:
        """The same with a column for each row."""
        first, *others = self.columns
        cells = [*map(str, first.cells)]
        made = table(str(first.header), *cells, text=len(cells) if others[-1].justify == "left" else 0)
        for column in others:
            made.add_row(str(column.header), *map(str, column.cells))
        return made

    def _row(self, i: int) -> Table:
        """The cells of one row, each in a line of its own after its column's heading."""
        made = Table(show_header=False, box=None, pad_edge=False)
        made.add_column(no_wrap=True, style="dim")
        made.add_column(overflow="fold")  # a path is whole
        for column in self.columns:
            made.add_row(str(column.header), [*map(str, column.cells)][i])
        return made


def table(*columns: str, title: str | None = None, text: int = 0) -> _FittingTable:
    """A table whose first column is text and whose others are numbers.

    text: how many of the last columns are text, too. The last one then has as many lines as it needs.
    """
    made = _FittingTable(header_style="bold", box=None, pad_edge=False)
    made.heading = title
    for i, column in enumerate(columns):
        left = len(columns) - i  # a text that has no spaces, such as a path, is folded
        is_text, wraps = not i or left <= text, left == 1 and text > 0
        made.add_column(column, justify="left" if is_text else "right", no_wrap=not wraps, overflow="fold")
    return made


def day_and_time(seconds: float) -> datetime:
    """When that was, on this machine's clock."""
    return datetime.fromtimestamp(seconds).astimezone()


def print_setting(setting: Mapping[str, Any]) -> None:
    """What a measurement was taken with, a line each."""
    made = table("", "", text=1)
    made.show_header, made.style = False, "dim"
    for name, value in setting.items():
        if value not in ({}, None, False):
            made.add_row(name, str(value))
    out.print(made)
    out.print()


@contextmanager
def progress_bar(label: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """A bar with the time left, on standard error; yields a function to call after each step.

    Without a terminal, a line is printed every 15 seconds.
    """
    if quiet:
        yield lambda: None
        return
    if not err.is_terminal:
        yield _lines(label, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)


def _lines(label: str, total: int) -> Callable[[], None]:
    """A function to call after each of `total` steps, which prints a line from time to time."""
    began = printed = time.monotonic()
    done = 0

    def step() -> None:
        nonlocal done, printed
        done, now = done + 1, time.monotonic()
        if now - printed >= _SECONDS_A_LINE:
            left = (now - began) / done * (total - done)
            shown = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
            err.print(f"{label}: {done} of {total}, about {shown} left", soft_wrap=True)
            printed = now

    return step


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
