"""`outrider tune`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.bench import describe
from outrider.cli.console import out, print_json, progress_bar, table
from outrider.cli.options import generation_options, json_option, load_options, read_options
from outrider.cli.tune_layers import tune_layers
from outrider.errors import OptionError, nearest

if TYPE_CHECKING:
    from outrider.engine import Engine

LONGEST = 8
REPEATS = 15  # of every timed call


@click.command()
@click.argument("bundle")
@click.option("--prompts", metavar="FILE", help="JSON Lines with 'turns' or 'prompt'.  [default: six of our own]")
@click.option("--per-category", type=click.IntRange(1), help="Use the first N prompts of each category.")
@click.option("--layers", is_flag=True, help="Find layers of the main model to draft with, and add that drafter.")
@click.option("--name", metavar="NAME", help="What requests call the drafter that --layers adds.  [default: self]")
@click.option("--dry-run", is_flag=True, help="With --layers: leave BUNDLE as it is.")
@load_options
@generation_options
@json_option
def tune(
    bundle: str,
    prompts: str | None,
    per_category: int | None,
    layers: bool,
    name: str | None,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure the cost of calls and the gain of drafting on this machine.

    The costs are saved, and num_assistant_tokens=auto decides by them. It is compared with fixed numbers of draft
    tokens of one drafter: the one that --drafter names, the bundle's own, or the suffix drafter.

    With --layers, a drafter is looked for that is made of the main model's own layers. It is added to BUNDLE as a list
    of these layers; there are no more weights.
    """
    from outrider.bench.modes.make import make_modes
    from outrider.bench.prompts import encode_prompts, read_prompts
    from outrider.bench.report.summary import collect, summarize
    from outrider.bench.runs.measure import measure, warm_up
    from outrider.engine import load

    if options.get("num_assistant_tokens") is not None:
        raise OptionError(f"--num-assistant-tokens is what tune varies, from 1 to {LONGEST}: leave it out.")
    config = read_options(options, max_new_tokens=64)
    if layers:
        tune_layers(bundle, config, prompts, per_category, name or "self", dry_run=dry_run, as_json=as_json)
        return
    if name is not None or dry_run:
        raise OptionError(f"{'--dry-run' if dry_run else '--name'} is for --layers. Add that, or leave it out.")
    if config.generation.drafter is None:
        raise OptionError("--drafter none leaves nothing to tune. Name a drafter, or leave the option out.")
    chosen = read_prompts(prompts, per_category)
    engine = load(bundle, config, enable_prefix_caching=False)  # every run reads its whole prompt
    engine.measure_costs(REPEATS)
    auto = config.generation.drafter
    drafter = next(iter(engine.bundled_drafters), "suffix") if auto == "auto" else auto
    if drafter not in engine.drafters:
        raise OptionError(f"There is no drafter '{drafter}' here. {nearest(drafter, engine.drafters)}")
    lengths = list(range(1, LONGEST + 1))
    modes = make_modes(["plain", auto, *(f"{drafter}:{n}" for n in lengths)], engine, forgets=True)
    tasks = encode_prompts(chosen, engine.tokenizer)
    with progress_bar("measuring", len(chosen) * len(modes), quiet=as_json) as advance:
        warm_up(modes, tasks, config.generation)
        records = measure(modes, tasks, config.generation, record=lambda _: advance())
    summary = summarize(collect(records), tasks, [mode.name for mode in modes], "plain")
    counts = (0, "auto", *lengths)
    found = (row for row in summary if row["category"] == "all")
    rows = [row | {"num_assistant_tokens": n} for n, row in zip(counts, found, strict=True)]
    best = max(rows, key=lambda row: row["speed_up"])
    setting = describe(engine, config.generation.max_new_tokens, 1)
    if as_json:
        costs = {role: dataclasses.asdict(cost) for role, cost in engine.costs.items()}
        choices = {role: dataclasses.asdict(choice) for role, choice in engine.choices.items()}
        figures = {"setting": setting, "choices": choices, "costs": costs, "drafter": drafter, "rows": rows}
        print_json(figures | {"best": best["num_assistant_tokens"]})
        return
    out.print("  ".join(f"{key}={value}" for key, value in setting.items()), style="dim")
    _print_settings(engine)
    for role, cost in engine.costs.items():
        made = table(f"{role} model, milliseconds a call", *(f"{n} rows" for n in cost.rows))
        for context, seconds in zip(cost.contexts, (cost.near, cost.far), strict=True):
            made.add_row(f"{context:,} tokens of context", *(f"{1000 * each:.1f}" for each in seconds))
        out.print(made)
    made = table("draft tokens", "acceptance rate", "tokens/round", "tokens/s", "vs plain", "slowest prompt")
    for row in rows:
        made.add_row(
            str(row["num_assistant_tokens"]),
            f"{row['acceptance_rate']:.0%}" if row["num_assistant_tokens"] else "-",
            f"{row['tokens_per_round']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speed_up']:.2f}×",
            f"{row['slowest']:.2f}×",
        )
    out.print(made)
    if best["num_assistant_tokens"]:
        name = auto if best["num_assistant_tokens"] == "auto" else drafter
        out.print(f"Best on these prompts: drafter={name}, num_assistant_tokens={best['num_assistant_tokens']}.")
    else:
        out.print("Plain decoding was the fastest on these prompts: use drafter=none here.")


def _print_settings(engine: Engine) -> None:
    """The models' settings and the trials that they were chosen from."""
    for role, choice in engine.choices.items():
        out.print(f"{role} model: {choice.setting.description if role == 'main' else choice.setting}", style="dim")
        if not choice.trials:
            continue
        counts = sorted({count for trial in choice.trials for count in trial.seconds})
        made = table(f"{role} model's settings", *(f"{n} tokens, ms" for n in counts), "KL to f32", "rows", "")
        made.columns[-1].justify = "left"
        for trial in choice.trials:
            made.add_row(
                str(trial.setting),
                *(f"{1000 * trial.seconds[n]:.1f}" if n in trial.seconds else "-" for n in counts),
                "-" if trial.kl is None else f"{trial.kl:.4f}",
                str(trial.setting.exactness.rule) if trial.setting.exactness.holds else "-",
                "taken" if trial.setting == choice.setting else trial.verdict,
            )
        out.print(made)
