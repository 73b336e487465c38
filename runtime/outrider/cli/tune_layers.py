"""`outrider tune-layers`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from outrider.bundle.manifest import describe_layers
from outrider.cli.console import err, out, print_json, table
from outrider.cli.opening import model_argument, open_model
from outrider.cli.options import generation_options, json_option, load_options, prompt_options, read_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider_bench.layers import DrafterLayers


@click.command()
@model_argument
@prompt_options
@click.option("--name", metavar="NAME", default="self", help="The name of the drafter.  [default: self]")
@click.option("--dry-run", is_flag=True, help="Do not change the bundle.")
@load_options
@generation_options
@json_option
def tune_layers(
    bundle: str,
    draft: str | None,
    prompts: str | None,
    per_category: int | None,
    name: str,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Find layers of the main model that can draft, and add them as a drafter.

    MODEL is a bundle, a .gguf file, a checkpoint folder or a hub id. The drafter is a list of some of the main model's
    layers in the bundle, without weights of its own.
    """
    from outrider_bench.layers import add_layers, check_name, find_layers, probe_engine
    from outrider_bench.prompts import encode_prompts, read_prompts

    config = read_options(options, max_new_tokens=64, measure="first")
    opened = open_model(bundle, draft, quiet=as_json, config=config)
    check_name(opened, name)
    chosen = read_prompts(prompts, per_category)
    with probe_engine(opened, config) as engine, err.status("Measuring layers", spinner="dots") as status:
        tasks = encode_prompts(chosen, engine.tokenizer)
        found = find_layers(engine, tasks, config.generation.max_new_tokens or 64, status.update)
    if not dry_run:
        add_layers(opened, name, found[0].layers)
    if as_json:
        print_json(
            {"bundle": str(opened.folder), "name": None if dry_run else name, "found": [asdict(each) for each in found]}
        )
        return
    _print(found)
    if not dry_run:
        out.print(f"{opened.folder} now has a drafter '{name}' of these layers.")
    if found[0].speed_up <= 1:
        out.print("This drafter is expected to be slower than plain decoding here, so drafter=auto will not use it.")
    elif not dry_run:
        out.print(f"Measure it: outrider tune {opened.folder} --drafter {name}", soft_wrap=True)


def _print(found: Sequence[DrafterLayers]) -> None:
    """The best layers, with what is expected of them."""
    places = range(1, len(found[0].acceptance) + 1)
    made = table("layers", "agreement", *(f"{i}" for i in places), "cost, passes", "draft tokens", "expected speed-up")
    for each in found:
        made.add_row(
            describe_layers(each.layers),
            f"{each.agreement:.0%}",
            *(f"{share:.0%}" for share in each.acceptance),
            f"{each.cost:.2f}",
            str(each.num_tokens),
            f"{each.speed_up:.2f}×",
        )
    out.print(made)
    out.print("Numbered columns: the share of drafts whose token at that position is accepted.", style="dim")
