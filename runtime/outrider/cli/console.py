"""The commands' output."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A table that is wider than the terminal wraps, and loses no column.
out = Console(
    markup=False,
    emoji=False,
    highlight=False,
    soft_wrap=True,
    width=max(shutil.get_terminal_size((120, 24)).columns, 110),
)
err = Console(stderr=True, markup=False, emoji=False, highlight=False)


def print_json(value: Any) -> None:
    """One JSON object on standard output, numbers to six significant digits."""
    json.dump(_rounded(value), sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")


def table(*columns: str, title: str | None = None) -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left", no_wrap=True)
    return made


@contextmanager
def progress_bar(label: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """A bar with the time left, on standard error; yields a function to call after each step."""
    if quiet:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
