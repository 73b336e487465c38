"""`outrider trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from outrider.cli.console import err, out, print_json, table
from outrider.cli.options import json_option
from outrider.config.files import user_path


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def trace(file: Path, as_json: bool) -> None:
    """Show where the time went in FILE, a trace.

    FILE comes from `outrider generate … --trace FILE`; https://ui.perfetto.dev shows all of it.
    """
    from outrider_bench.timeline import read_timeline, summarise

    summary = summarise(read_timeline(user_path(file)))
    if as_json:
        print_json(summary)
    else:
        _print(summary)


def _print(summary: dict[str, Any]) -> None:
    if not summary["is_whole"]:
        err.print("The trace is incomplete: the program that wrote it did not finish it.")
    if not summary["rounds"]:
        out.print("This trace has no round of decoding.")
        return
    accepted = f"{summary['accepted']} of {summary['drafted']} draft tokens accepted"
    out.print(
        f"{summary['seconds']:.2f} s of decoding: {summary['rounds']} rounds, {summary['tokens']} tokens, {accepted}"
    )
    made = table("", "share", "calls", "ms per call")
    for lane, device in summary["devices"].items():
        made.add_row(lane, f"{device['share']:.1%}", str(device["calls"]), f"{device['milliseconds']:.2f}")
    if len(summary["devices"]) > 1:
        made.add_row("both devices", f"{summary['both']:.1%}")
    made.add_row("host only", f"{sum(summary['host'].values()):.1%}", "", f"{summary['host_milliseconds']:.2f}")
    for name, share in summary["host"].items():
        made.add_row(f"  {name}", f"{share:.2%}")
    out.print(made)
    if summary["gap_milliseconds"] is not None:
        out.print(f"Between two consecutive draft calls: {summary['gap_milliseconds']:.2f} ms (median)")
