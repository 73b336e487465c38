"""How a distillation goes on: lines for the terminal, a page that refreshes itself, and TensorBoard's logs.

live = Live(work, plan.lines(), tell=print)
live.stage("data", "Writing data")
write_data(..., progress=live.wrote)
fit(..., watch=live)
"""

from __future__ import annotations

import html
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from outrider.errors import ExportError, install
from outrider.system.files import write_whole
from outrider_export.distill.curve import curve
from outrider_export.distill.prediction import Costs, predict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from outrider_export.distill.answers import Progress as Written
    from outrider_export.train.fit import Evaluation, Status

_LINE_EVERY, _PAGE_EVERY = 30.0, 5.0  # seconds
_REFRESH = 10


class Live:
    """Shows where the work is. A `Watch` of training.

    folder: gets progress.html and tensorboard/. lines: the plan. tell: prints a line. costs: for the expected speed-up.
    """

    def __init__(self, folder: Path, lines: Sequence[str], tell: Callable[[str], None]) -> None:
        self._folder, self._lines, self.tell = folder, list(lines), tell
        self._title, self._facts = "", dict[str, str]()
        self._table: list[list[str]] = []
        self._evaluations: list[Evaluation] = []
        self._kept: list[tuple[float, int]] = []  # seconds of this run, and tokens of data then
        self._ends = False
        self._told = self._shown = 0.0
        self._logs: Any = None
        self.costs: Costs | None = None
        for line in lines:
            tell(line)

    def stage(self, title: str) -> None:
        """Begin a stage."""
        self._title, self._facts, self._evaluations, self._kept = title, {}, [], []
        self.tell(title)
        self._show(at_once=True)

    def table(self, rows: list[list[str]]) -> None:
        """Show why a kind was chosen. rows: the first is the head."""
        self._table = rows
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            self.tell("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        self._show(at_once=True)

    def wrote(self, state: Written) -> None:
        """Data has been written."""
        left, is_done = state.seconds_left, state.num_safe >= state.num_wanted
        speed = state.num_written / max(state.seconds, 1)
        self._facts = {"tokens kept": f"{state.num_tokens:,}", "conversations": f"{state.num_conversations:,}"}
        self._facts |= (
            {}
            if is_done
            else {
                "now": "writing answers" if state.is_asking else "writing prompts, which are answered next",
                "tokens kept": f"{state.num_tokens:,} of about {state.num_expected:,}",
                "conversations": f"{state.num_conversations:,}",
                "tokens written in this run": f"{state.num_written:,}, {speed:.0f} per second",
                "left": "not known yet" if left is None else _duration(left),
            }
        )
        self._kept.append((state.seconds, state.num_tokens))
        self._say()

    def stopped(self) -> None:
        """Nothing follows: the page refreshes itself no more."""
        self._title += ": stopped. The same command goes on."
        self._ends = True
        self._show(at_once=True)

    def stepped(self, status: Status) -> None:
        """See `Watch`."""
        self._facts = self._facts | {
            "step": f"{status.step:,} of {status.num_steps:,}, epoch {status.epoch}",
            "tokens": f"{status.num_tokens:,}",
            "loss": f"{status.loss:.3f}",
            "left": _duration(status.seconds_left),
        }
        self._say()

    def evaluated(self, status: Status) -> None:
        """See `Watch`."""
        self._evaluations = status.evaluations
        last = status.evaluations[-1]
        self._facts |= {
            "acceptance by place": " ".join(f"{each:.0%}" for each in last.acceptance),
            "tokens per round": f"{last.tokens_per_round:.2f}",
        }
        if self.costs is not None:
            found = predict(last.acceptance, self.costs)
            self._facts["expected here"] = f"{found.speed_up:.2f}× with {found.num_draft_tokens} draft tokens"
        self._log(status.kind, last)
        self._say(at_once=True)

    def finish(self, line: str) -> None:
        """The last line; the page refreshes itself no more."""
        self._title, self._ends = "Done", True
        self.tell(line)
        self._show(at_once=True)
        if self._logs is not None:
            self._logs.close()

    def _say(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._told > _LINE_EVERY:
            self._told = now
            self.tell(", ".join(f"{name} {value}" for name, value in self._facts.items()))
        self._show(at_once=at_once)

    def _show(self, *, at_once: bool = False) -> None:
        """Write the page, whole or not at all."""
        now = time.monotonic()
        if not at_once and now - self._shown < _PAGE_EVERY:
            return
        self._shown = now
        path = self._folder / "progress.html"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, self._page().encode())
        except PermissionError:  # Windows, while a browser reads it
            return
        except OSError as error:
            raise ExportError(f"{path} cannot be written: {error.strerror}. Make room.") from error

    def _page(self) -> str:
        refresh = "" if self._ends else f'<meta http-equiv="refresh" content="{_REFRESH}">'
        facts = "".join(
            f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in self._facts.items()
        )
        kinds = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in self._table)
        plan = "".join(f"<p>{_text(line)}</p>" for line in self._lines)
        curves = self._curves()
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8">{refresh}<title>outrider distill</title>'
            f"<style>{_STYLE}</style><h1>{_text(self._title)}</h1>{plan}<table>{facts}</table>"
            f"{curves}<table>{kinds}</table></html>\n"
        )

    def _curves(self) -> str:
        """Of data while it is written, and of training."""
        if self._kept:
            minutes = [seconds / 60 for seconds, _ in self._kept]
            return curve("tokens of data", "minutes of this run", minutes, [count for _, count in self._kept])
        tokens, found = [each.num_tokens for each in self._evaluations], self._evaluations
        axis = "tokens trained"
        rounds = curve("tokens per round, held-out text", axis, tokens, [each.tokens_per_round for each in found])
        return rounds + curve("loss", axis, tokens, [each.loss for each in found])

    def _log(self, kind: str, last: Evaluation) -> None:
        """Add an evaluation to TensorBoard's logs."""
        if self._logs is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self._logs = _NoLogs()
                self.tell(f"No TensorBoard logs, as tensorboard is not installed. Run: {install('distill')}")
            else:
                self._logs = SummaryWriter(self._folder / "tensorboard")
        self._logs.add_scalar(f"{kind}/loss", last.loss, last.step)
        self._logs.add_scalar(f"{kind}/tokens per round", last.tokens_per_round, last.step)
        for place, share in enumerate(last.acceptance, 1):
            self._logs.add_scalar(f"{kind}/acceptance {place}", share, last.step)
        self._logs.flush()


class _NoLogs:
    """In the place of TensorBoard's writer."""

    def add_scalar(self, *_: object) -> None:
        """Ignored."""

    def flush(self) -> None:
        """Ignored."""

    def close(self) -> None:
        """Ignored."""


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;color:#222;"
    "background:#fff}table{border-collapse:collapse;margin:1rem 0}th{color:#666}"
    "td,th{text-align:left;padding:.2rem 1.2rem .2rem 0;font-weight:normal}svg{width:100%;height:auto}"
)


def _text(value: str) -> str:
    return html.escape(value)


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds, such as 1:05:00."""
    return str(timedelta(seconds=round(min(max(seconds, 0), 1e9))))
