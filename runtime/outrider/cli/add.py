"""`outrider add`."""

from __future__ import annotations

from typing import Any

import click

from outrider.cli.console import out, print_json
from outrider.cli.export import Bars
from outrider.cli.options import json_option
from outrider.errors import ExportError


@click.command()
@click.argument("bundle")
@click.argument("drafter")
@click.option("--name", metavar="NAME", help="What requests call it.  [default: its kind]")
@click.option("--weights", metavar="FORMAT", help="int8, fp16 or fp32.  [default: int8]")
@click.option("--draft-vocab", metavar="N|all", help="How many tokens it proposes, if it has no output matrix.")
@click.option("--draft-vocab-corpus", metavar="FILE", help="Choose them by a text like those to be written.")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of DRAFTER on the hub.")
@json_option
def add(bundle: str, drafter: str, as_json: bool, **options: Any) -> None:
    """Add to BUNDLE a drafter that is no model of its own.

    DRAFTER is a checkpoint folder or hub id: EAGLE-3, EAGLE, MTP, DFlash, Medusa, Hydra, blockwise heads or masks. Or a
    folder with a packed drafter, which needs no further packages.
    """
    try:
        from outrider_export import add_drafter
    except ImportError as error:
        raise ExportError(
            f'The export half of outrider is not installed ({error}). Run: pip install "outrider[export]"'
        ) from error
    with Bars(quiet=as_json) as bars:
        made = add_drafter(bundle, drafter, progress=bars, **options)
    entry = made.manifest.drafters[-1]
    size = sum(file.size for file in made.manifest.files if file.path.startswith(f"{entry.model.folder}/"))
    if as_json:
        print_json({"bundle": str(made.folder), "name": entry.name, "kind": entry.kind, "bytes": size})
        return
    out.print(f"{bundle} has a drafter '{entry.name}' ({entry.kind}, {size / 1e6:.1f} MB) now.")
    out.print(f"Try it: outrider generate {bundle} 'Write a haiku about sledges' --drafter {entry.name} --compare")
