"""`outrider bench`."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.console import err, out, print_json, progress_bar, table
from outrider.cli.options import generation_options, json_option, load_options, read_options
from outrider.config import LOSSY

if TYPE_CHECKING:
    from outrider.engine import Engine


@click.command()
@click.argument("bundle")
@click.option("--prompts", metavar="FILE", help="JSON Lines with 'turns' or 'prompt'.  [default: six of our own]")
@click.option("--per-category", type=click.IntRange(1), help="Use the first N prompts of each category.")
@click.option(
    "--modes",
    default=None,
    help="Comma-separated: plain, draft:N, ngram:N, suffix:N, and openvino-genai's genai, genai-draft:N, "
    "genai-ngram:N. The first is what the others are compared with.  [default: plain, then all the bundle's drafters]",
)
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Runs of every prompt and mode.")
@load_options
@generation_options
@json_option
def bench(
    bundle: str,
    prompts: str | None,
    per_category: int | None,
    modes: str | None,
    repeats: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare ways to decode on BUNDLE.

    All run interleaved, on the same files, prompts and threads.
    """
    from outrider.bench.measure import measure, summarize
    from outrider.bench.modes import make_modes
    from outrider.bench.prompts import read_prompts
    from outrider.engine import load

    config = read_options(options, max_new_tokens=96)
    chosen = read_prompts(prompts, per_category)
    engine = load(bundle, config)
    names = modes.split(",") if modes else ["plain", *(d for d in engine.drafters)]
    made = make_modes([name.strip() for name in names], engine)
    with progress_bar("measuring", len(chosen) * len(made) * repeats, quiet=as_json) as advance:
        measurements = measure(engine, made, chosen, config.generation, repeats, advance)
    rows = summarize(measurements, [mode.name for mode in made], made[0].name)
    setting = describe(engine, config.generation.max_new_tokens, repeats)
    if config.generation.temperature:
        sampling = config.generation.sampling
        setting["sampling"] = f"{sampling} (LOSSY)" if sampling in LOSSY else sampling
    if as_json:
        runs = [
            {
                "id": m.prompt.id,
                "category": m.prompt.category,
                "num_prompt_tokens": m.num_prompt_tokens,
                "mode": mode,
                "token_ids": run.token_ids,
                "first_token_seconds": run.first_token_seconds,
                "total_seconds": run.total_seconds,
                "stats": run.stats,
            }
            for m in measurements
            for mode, mode_runs in m.runs.items()
            for run in mode_runs
        ]
        print_json({"setting": setting, "summary": rows, "runs": runs})
        return
    out.print("  ".join(f"{key}={value}" for key, value in setting.items()), style="dim")
    columns = (
        "tokens/s",
        f"vs {made[0].name}",
        "slowest",
        "end to end",
        "identical",
        "accepted",
        "tokens/round",
        "host",
    )
    made_table = table("mode", "category", *columns)
    for row in rows:
        known = "acceptance_rate" in row
        made_table.add_row(
            row["mode"],
            row["category"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['speed_up']:.2f}×",
            f"{row['slowest']:.2f}×",
            f"{row['end_to_end']:.2f}×",
            f"{row['identical']}/{row['num_prompts']}",
            f"{row['acceptance_rate']:.0%}" if known else "-",
            f"{row['tokens_per_round']:.2f}" if known else "-",
            f"{row['host_share']:.1%}" if known else "-",
        )
    out.print(made_table)
    slower = [row for row in rows if row["category"] == "all" and row["speed_up"] < 1]
    for row in slower:
        err.print(f"{row['mode']} is slower than {made[0].name} on these prompts: {row['speed_up']:.2f}×.")


def describe(engine: Engine, max_new_tokens: int | None, repeats: int) -> dict[str, Any]:
    """What a figure was measured on."""
    manifest = engine.bundle.manifest
    return {
        "main": f"{manifest.main.source.id} {manifest.main.weights}",
        "draft": ", ".join(f"{d.model.source.id} {d.model.weights}" for d in manifest.drafters) or "none",
        **engine.setting,
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "outrider": version("outrider"),
        "openvino": version("openvino"),
        "openvino-genai": version("openvino-genai"),
        "python": platform.python_version(),
    }
