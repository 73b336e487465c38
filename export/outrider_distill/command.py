"""`outrider distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from outrider.cli.console import err, out, print_json
from outrider.cli.export import Bars, terminable
from outrider.cli.options import json_option
from outrider.config.files import user_path
from outrider.errors import ExportError, needs

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("main")
@click.option("-o", "--output", metavar="FOLDER", required=True, help="Folder to make, with the drafter.")
@click.option(
    "--kind",
    metavar="KIND",
    default="auto",
    show_default=True,
    help="eagle3, draft, or auto: the kind that gains most in the remaining hours.",
)
@click.option("--from", "source", metavar="DRAFTER", help="Draft model to take layers out of, or a head to train on.")
@click.option("--layers", "num_layers", type=int, metavar="N", help="How many of the draft model's layers to keep.")
@click.option(
    "--prompts", type=_FILE, help="Your prompts: .txt with one per line, or .jsonl. They are half of all prompts."
)
@click.option(
    "--exclude", "excluded", type=_FILE, help="Prompts to leave out of the training data, such as those of your tests."
)
@click.option(
    "--tokens", "num_tokens", metavar="N", default="2M", show_default=True, help="Tokens of answers to train on."
)
@click.option("--hours", type=float, default=8.0, show_default=True, help="Most hours for data and training together.")
@click.option("--into", metavar="BUNDLE", help="Add the drafter to this bundle.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of prompts, answers and training.")
@click.option("--keep-work", is_flag=True, help="Keep the work folder with data and checkpoints at the end.")
@json_option
def distill(main: str, output: str, num_tokens: str, into: str | None, as_json: bool, **options: Any) -> None:
    """Train a drafter for MAIN on MAIN's own answers.

    MAIN is a bundle, a checkpoint folder, a .gguf file or a hub id. It answers your prompts and prompts that it
    generates itself, and the drafter learns to predict the answers. All files are in the folder OUTPUT.work until the
    end. Run the same command again to continue after Ctrl-C or a kill.
    """
    with needs("Training needs packages that are not installed", "distill", ExportError):
        from outrider_distill.plan import Options, parse_count
        from outrider_distill.run import distill as run
        from outrider_distill.train.fit import Stopped
    asked = Options(
        main,
        user_path(output).absolute(),
        num_tokens=parse_count(num_tokens),
        into=None if into is None else user_path(into),
        **options,
    )
    with terminable(), Bars(quiet=as_json) as bars:
        try:
            found = run(asked, progress=bars, tell=bars.note, status=bars.status)
        except Stopped as stop:
            err.print(f"Stopped. {stop}")
            raise KeyboardInterrupt from None
    if as_json:
        print_json(
            {
                "drafter": output,
                "kind": found.kind,
                "training": found.report,
                "shortfall": found.shortfall or None,
                "notes": bars.notes,
            }
        )
        return
    if found.shortfall:
        out.print(found.shortfall)
    elif into is None:
        out.print(f"Use it: outrider add BUNDLE {output}", soft_wrap=True)
    else:
        out.print(f"Try it: outrider generate {into} 'Write a haiku about sledges' --compare", soft_wrap=True)
