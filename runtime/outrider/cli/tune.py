"""`outrider tune`."""

from __future__ import annotations

from typing import Any

import click

from outrider.cli.bench import describe
from outrider.cli.console import out, print_json, progress_bar, table
from outrider.cli.options import generation_options, json_option, load_options, read_options
from outrider.errors import OptionError, nearest

LONGEST = 8


@click.command()
@click.argument("bundle")
@click.option("--prompts", metavar="FILE", help="JSON Lines with 'turns' or 'prompt'.  [default: six of our own]")
@click.option("--per-category", type=click.IntRange(1), help="Use the first N prompts of each category.")
@load_options
@generation_options
@json_option
def tune(bundle: str, prompts: str | None, per_category: int | None, as_json: bool, **options: Any) -> None:
    """Measure what each draft length earns on this machine.

    For the bundle's own drafter, else n-gram, or the one that --drafter names.
    """
    from outrider.bench.measure import measure, warm_up
    from outrider.bench.modes import make_modes
    from outrider.bench.prompts import encode_prompts, read_prompts
    from outrider.bench.summary import collect, summarize
    from outrider.engine import load

    if options.get("num_assistant_tokens") is not None:
        raise OptionError(f"--num-assistant-tokens is what tune varies, from 1 to {LONGEST}: leave it out.")
    config = read_options(options, max_new_tokens=64)
    if config.generation.drafter is None:
        raise OptionError("--drafter none leaves nothing to tune. Name a drafter, or leave the option out.")
    chosen = read_prompts(prompts, per_category)
    engine = load(bundle, config)
    drafter = engine.drafters[0] if config.generation.drafter == "auto" else config.generation.drafter
    if drafter not in engine.drafters:
        raise OptionError(f"There is no drafter '{drafter}' here. {nearest(drafter, engine.drafters)}")
    modes = make_modes(["plain", *(f"{drafter}:{n}" for n in range(1, LONGEST + 1))], engine)
    tasks = encode_prompts(chosen, engine.tokenizer)
    with progress_bar("measuring", len(chosen) * len(modes), quiet=as_json) as advance:
        warm_up(modes, tasks, config.generation)
        records = measure(modes, tasks, config.generation, record=lambda _: advance())
    summary = summarize(collect(records), tasks, [mode.name for mode in modes], "plain")
    rows = [row | {"num_assistant_tokens": n} for n, row in enumerate(r for r in summary if r["category"] == "all")]
    best = max(rows, key=lambda row: row["speed_up"])
    setting = describe(engine, config.generation.max_new_tokens, 1)
    if as_json:
        print_json({"setting": setting, "drafter": drafter, "rows": rows, "best": best["num_assistant_tokens"]})
        return
    made = table("draft length", "acceptance rate", "tokens/round", "tokens/s", "vs plain", "slowest prompt")
    for row in rows:
        made.add_row(
            str(row["num_assistant_tokens"]),
            f"{row['acceptance_rate']:.0%}" if row["num_assistant_tokens"] else "-",
            f"{row['tokens_per_round']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speed_up']:.2f}×",
            f"{row['slowest']:.2f}×",
        )
    out.print("  ".join(f"{key}={value}" for key, value in setting.items()), style="dim")
    out.print(made)
    if best["num_assistant_tokens"]:
        out.print(f"Best on these prompts: drafter={drafter}, num_assistant_tokens={best['num_assistant_tokens']}.")
    else:
        out.print("Plain decoding was the fastest on these prompts: use drafter=none here.")
