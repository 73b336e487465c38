"""`outrider improve`."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.cli.console import err, out, print_json, table
from outrider.cli.export import Bars, terminable
from outrider.cli.options import json_option
from outrider.config.files import user_path
from outrider.errors import ExportError, needs
from outrider.system.files import usable

if TYPE_CHECKING:
    from outrider_distill.improve_work import ImproveRound


@click.command()
@click.argument("bundle")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Your prompts: .txt with one per line, or .jsonl. They are half of all prompts; some are measured with.",
)
@click.option("--hours", type=click.FloatRange(0, 10_000, min_open=True), metavar="N", help="Most hours.  [default: 8]")
@click.option("--no-wait", is_flag=True, help="Do not wait while other programs use the processor, or on battery.")
@click.option("--status", is_flag=True, help="Instead: say what is done, what is left, and what is expected.")
@click.option("--undo", is_flag=True, help="Instead: restore the bundle as it was before the last improvement.")
@json_option
def improve(
    bundle: str, prompts: Path | None, hours: float | None, no_wait: bool, status: bool, undo: bool, as_json: bool
) -> None:
    """Make BUNDLE faster on this machine: train drafters, and keep one if answers are faster with it.

    It measures answers to prompts that it has not trained on, before and after. It runs at low priority, and waits
    between steps while other programs use the processor, or the machine runs on its battery. Run the same command again
    to continue after Ctrl-C or a kill; after the end, it begins a further round from what is there.
    """
    with needs("Training needs packages that are not installed", "distill", ExportError):
        from outrider_distill.improve import improve as improve_bundle
        from outrider_distill.improve_work import ImproveWork
        from outrider_distill.machine import Others
        from outrider_distill.train.fit import Stopped
        from outrider_export.child import lower_priority
    work = ImproveWork(usable(user_path(bundle)))
    if status:
        lines = work.status()
        print_json({"status": lines}) if as_json else out.print("\n".join(lines), soft_wrap=True)
        return
    if undo:
        undone = work.undo()
        print_json({"undone": undone.number}) if as_json else out.print(f"{bundle} is as it was before.")
        return
    lower_priority()
    with terminable(), Bars(quiet=as_json) as bars:
        # A new round is planned for its hours, and ends a little later: what is loaded is not among them.
        others = Others(bars.note, hours if hours and work.is_begun else math.inf, looks=not no_wait)
        try:
            found = improve_bundle(
                work.path, prompts=prompts, hours=hours or 8.0, progress=bars, tell=bars.note, status=bars.status,
                wait=others.wait,
            )  # fmt: skip
        except Stopped as stop:
            err.print(f"Stopped. {stop}")
            if others.is_over:
                return
            raise KeyboardInterrupt from None
    _print(bundle, found, as_json)


def _print(bundle: str, found: ImproveRound, as_json: bool) -> None:
    if as_json:
        print_json(asdict(found))
        return
    made = table("category", "tokens/s before", "after", "whole answers")
    for category, before, after, ratio in found.rows:
        made.add_row(category, f"{before:.1f}", f"{after:.1f}", f"{ratio:.2f}×")
    out.print(made)
    if found.kept:
        out.print(f"Kept: {found.why}, and the texts are the same. Undo it: outrider improve {bundle} --undo")
    else:
        out.print(f"Not kept: {found.why}. {bundle} is as it was. Run it again, for longer or with your --prompts.")
