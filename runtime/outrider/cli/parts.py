"""What `outrider inspect` prints of an architecture that has no entry: its parts, known and missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from outrider.bundle.manifest import MANIFEST_NAME
from outrider.cli.console import out, print_json, table
from outrider.errors import ExportError, OptionError, needs

if TYPE_CHECKING:
    from outrider_export.describe.parts import Report


def is_unknown_architecture(path: Path) -> bool:
    """Whether a path is a config.json, or the checkpoint folder of an architecture without an entry."""
    if path.suffix == ".json" and path.is_file():
        return True
    if not path.is_dir() or (path / MANIFEST_NAME).is_file() or not (path / "config.json").is_file():
        return False
    with needs("Reading a checkpoint", "export", ExportError):
        from outrider_export.describe.parts import has_no_entry
    return has_no_entry(path)


def print_parts(path: Path, *, draft: str | None, check: bool, as_json: bool) -> None:
    """Print the report of an architecture.

    Raises:
        OptionError: for an option of bundles.
        ExportError: when the configuration is damaged.
    """
    if draft is not None or check:
        option = "--draft" if draft is not None else "--check"
        raise OptionError(f"{option} is for models that can be exported, and {path} is an architecture. Leave it out.")
    with needs("Reading a configuration", "export", ExportError):
        from outrider_export.describe.parts import report_of
    report = report_of(path)
    if as_json:
        print_json({"path": str(path), "verdict": report.verdict, **msgspec.to_builtins(report)})
        return
    _print(report)


def _print(report: Report) -> None:
    entry = "has an entry" if report.has_entry else f"has no entry; compared with that of '{report.like}'"
    out.print(f"{report.architecture} {entry}", style="bold", soft_wrap=True)
    if report.refused:
        out.print(f"It is refused: {report.refused}.", soft_wrap=True)
    rows = table("part", "known", "the configuration says", text=2)
    for part in report.parts:
        rows.add_row(part.name, "yes" if part.known else "missing", part.says)
    out.print(rows)
    if report.elsewhere:
        keys = ", ".join(f"{key} ('{entry}')" for key, entry in report.elsewhere.items())
        out.print(f"Keys that other entries read: {keys}", soft_wrap=True)
    for what, names in (("Keys that no entry reads", report.unread), ("Tensors that it has not", report.tensors)):
        if names:
            out.print(f"{what}: {', '.join(names)}", soft_wrap=True)
    if report.obstacle:
        out.print(f"Read by that entry, it has {report.obstacle}.", soft_wrap=True)
    out.print(f"{report.verdict} See docs/new-architecture.md.", soft_wrap=True)
