"""`outrider tune --layers`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from outrider.bundle.manifest import describe_layers
from outrider.cli.console import err, out, print_json, table

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.bundle.folder import Bundle
    from outrider.config import Config
    from outrider_bench.layers import Found


def tune_layers(
    opened: Bundle,
    config: Config,
    prompts: str | None,
    per_category: int | None,
    name: str,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Find the layers of the main model that draft best on some prompts, and add that drafter to the bundle."""
    from outrider_bench.layers import add_layers, check_name, find_layers, probe_engine
    from outrider_bench.prompts import encode_prompts, read_prompts

    check_name(opened, name)
    chosen = read_prompts(prompts, per_category)
    with (
        probe_engine(opened, config) as engine,
        err.status("Measuring layers", spinner="dots") as status,
    ):
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
        out.print(f"{opened.folder} has a drafter '{name}' of these layers now.")
    if found[0].speed_up <= 1:
        out.print("It is expected to be slower than plain decoding here, and drafter=auto will leave it alone.")
    elif not dry_run:
        out.print(f"Measure it: outrider tune {opened.folder} --drafter {name}", soft_wrap=True)


def _print(found: Seq[Found]) -> None:
    """The best layers, with what is expected of them."""
    places = range(1, len(found[0].acceptance) + 1)
    made = table("layers", "agreement", *(f"{i}" for i in places), "cost, passes", "draft tokens", "expected")
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
    out.print("Numbered columns: the share of drafts whose token at that place is accepted.", style="dim")
