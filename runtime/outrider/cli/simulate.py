"""`outrider simulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outrider.cli.console import err, out, print_json, print_setting, progress_bar, table
from outrider.cli.opening import load_model, model_argument, open_model
from outrider.cli.options import generation_options, json_option, load_options, read_options
from outrider.config.files import user_path

if TYPE_CHECKING:
    from outrider_bench.simulation.profiles import Profile

_MODES = "plain,draft:3,auto"


@click.command()
@model_argument
@click.option(
    "--profile", metavar="FILE", help="Times of calls on another machine.  [default: this machine's, measured]"
)
@click.option("--modes", default=_MODES, show_default=True, help="Comma-separated: plain, auto, draft[:N].")
@click.option("--prompts", metavar="FILE", help="JSON Lines with 'turns' or 'prompt'.  [default: six built-in prompts]")
@click.option("--per-category", type=click.IntRange(1), help="Use the first N prompts of each category.")
@load_options
@generation_options
@json_option
def simulate(
    bundle: str,
    draft: str | None,
    profile: str | None,
    modes: str,
    prompts: str | None,
    per_category: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict the speed of MODEL, a pair, on another machine, with and without overlap.

    The models run here, but times come from a profile. Without a profile, this machine's times are measured, and the
    predictions are compared with measurements.
    """
    from outrider_bench.modes.name import split_modes
    from outrider_bench.prompts import encode_prompts, read_prompts
    from outrider_bench.simulation.profiles import read_profile
    from outrider_bench.simulation.simulate import check_modes, compare

    config = read_options(options, max_new_tokens=64)
    names = split_modes(modes)
    check_modes(names)
    given = read_profile(user_path(profile)) if profile else None
    chosen = read_prompts(prompts, per_category)
    opened = open_model(bundle, draft, quiet=as_json, config=config)
    engine = load_model(opened, config, enable_prefix_caching=False)  # every run reads its whole prompt
    tasks = encode_prompts(chosen, engine.tokenizer)
    with progress_bar("simulating", len(tasks), quiet=as_json) as advance:
        found, rows = compare(engine, tasks, names, given, advance)
    if as_json:
        print_json({"profile": _describe(found), "measured": given is None, "rows": rows})
        return
    print_setting(_describe(found))
    made = table("mode", "predicted tokens/s", f"vs {names[0]}", *(("measured tokens/s", "error") if not given else ()))
    for row in rows:
        cells = [row["mode"], f"{row['predicted']:.1f}", f"{row['speed_up']:.2f}×"]
        if row["measured"]:
            cells += [f"{row['measured']:.1f}", f"{row['predicted'] / row['measured'] - 1:+.0%}"]
        made.add_row(*cells)
    out.print(made)
    if given:
        err.print(f"These are predictions from the times in {profile}, not measurements.")


def _describe(profile: Profile) -> dict[str, Any]:
    return {
        "profile": profile.name,
        **{
            f"{role}_ms": {n: round(1000 * cost(n), 2) for n in cost.rows}
            for role, cost in (("main", profile.main), ("draft", profile.draft))
        },
        "contention": {"check": round(profile.contention.check, 2), "draft": round(profile.contention.draft, 2)},
        "host_ms": round(1000 * profile.host, 2),
    }
