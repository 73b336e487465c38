"""`outrider bench`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.console import err, out, print_json, print_setting, progress_bar, table
from outrider.cli.opening import model_argument, open_model
from outrider.cli.options import generation_options, json_option, load_options, prompt_options, read_options
from outrider.config import LOSSY
from outrider.config.files import user_path
from outrider.errors import OptionError
from outrider.system.files import usable

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.engine.engine import Engine
    from outrider_bench.modes.setup import Setup


def _read_models(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, Path]:
    """Paths by name from NAME=PATH."""
    models = {}
    for pair in given:
        name, _, path = pair.partition("=")
        if not name or not path:
            raise click.BadParameter(f"'{pair}' is not NAME=PATH, such as llamacpp=model.gguf.", context, parameter)
        models[name] = usable(user_path(path))
    return models


def _read_levels(context: click.Context, parameter: click.Parameter, given: str | None) -> list[int] | None:
    """Different numbers of requests, ascending."""
    if given is None:
        return None
    numbers = given.split(",")
    if not all(number.strip().isdecimal() and int(number) for number in numbers):
        raise click.BadParameter(
            f"'{given}' is not a list of numbers of requests, such as 1,2,4,8.", context, parameter
        )
    return sorted({int(number) for number in numbers})


@click.command()
@model_argument
@prompt_options
@click.option(
    "--modes",
    help="Comma-separated: plain, auto, draft[:N], ngram[:N], suffix[:N]; openvino-genai's genai, genai-draft[:N], "
    "genai-dynamic[:T], genai-ngram[:N], genai-eagle3[:N], genai-dflash[:N]; "
    "llamacpp, llamacpp-ngram[:N], llamacpp-draft[:N]; "
    "onnxruntime-genai's ortgenai, ortgenai-ngram[:N], ortgenai-draft[:N]. "
    "genai/f32, genai-draft:3/bf16 and so on compute in that precision; without a slash, openvino-genai's modes "
    "compute in the device's default. "
    "The others are compared with the first one.  [default: plain, auto, all drafters, genai in each precision]",
)
@click.option(
    "--peer-model",
    "peer_models",
    multiple=True,
    metavar="NAME=PATH",
    callback=_read_models,
    help="A model for llamacpp, llamacpp-draft, ortgenai, ortgenai-draft, "
    "genai-draft, genai-eagle3 or genai-dflash, or another bundle for modes such as auto@NAME. Several times.",
)
@click.option("--repeats", type=click.IntRange(1), help="Runs of every prompt and mode.  [default: 1, quick: 3]")
@click.option(
    "--concurrency",
    metavar="N,…",
    callback=_read_levels,
    help="Instead: tokens per second with N requests running at any time, for each N, as 1,2,4,8, in Outrider's modes, "
    "openvino-genai's and llama-server's.  [default modes: plain, auto, genai in each precision; repeats: 3]",
)
@click.option("--quick", is_flag=True, help="Finish within ten minutes, with fewer prompts.")
@click.option(
    "--out", "folder", metavar="DIR", help="Write runs, results and a report here; continue an interrupted run."
)
@load_options
@generation_options
@json_option
def bench(
    bundle: str,
    draft: str | None,
    prompts: str | None,
    per_category: int | None,
    modes: str | None,
    peer_models: dict[str, Path],
    repeats: int | None,
    concurrency: list[int] | None,
    quick: bool,
    folder: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare modes of decoding with MODEL, and other runtimes.

    MODEL is a bundle, a .gguf file, a checkpoint folder or a hub id.

    All modes run interleaved, on the same prompts and threads, each engine in a process of its own. With --out DIR, an
    interrupted run continues when the same command is given again. With --concurrency, tokens/s are those of all
    requests that run at the same time, after the first token of each.
    """
    from outrider_bench.benchmark import run, save
    from outrider_bench.concurrency import run as run_together
    from outrider_bench.modes.setup import Setup
    from outrider_bench.prompts import read_prompts
    from outrider_bench.setting import default_num_threads

    if concurrency and (quick or folder):
        raise OptionError(f"--concurrency and {'--quick' if quick else '--out'} cannot be combined. Leave one out.")
    config = read_options(options, max_new_tokens=64 if quick else 96, measure="first")
    chosen = read_prompts(prompts, per_category)
    if not config.device.num_threads:
        config = config.replace(num_threads=default_num_threads())
    setup = Setup(open_model(bundle, draft, quiet=as_json, config=config), config, peer_models)
    setup, names = _choose_modes(setup, modes, together=bool(concurrency))
    repeats = repeats or (3 if quick or concurrency else 1)
    bar = partial(progress_bar, "measuring, ten minutes at most" if quick else "measuring", quiet=as_json)
    try:
        if concurrency:
            results = run_together(setup, chosen, names, concurrency, repeats=repeats, progress=bar)
        else:
            results = run(setup, chosen, names, repeats=repeats, folder=folder, quick=quick, progress=bar)
    except KeyboardInterrupt:
        if folder:
            err.print(f"The runs so far are in {folder}; the same command continues from there.")
        raise
    written = save(results, user_path(folder)) if folder else []
    if as_json:
        print_json(results)
        return
    (_print_together if concurrency else _print)(results)
    for path in written:
        err.print(f"Wrote {path}")


def _choose_modes(setup: Setup, modes: str | None, *, together: bool) -> tuple[Setup, list[str]]:
    """The setup with its devices' own names, as the peers do not know "auto", and the modes to compare on it."""
    from outrider.models.tuning.model_spec import specs_of
    from outrider.models.tuning.placement import choose_devices
    from outrider_bench import benchmark, concurrency
    from outrider_bench.modes.make import default_modes
    from outrider_bench.modes.name import split_modes

    names = split_modes(modes) if modes else []
    # Before devices are tried, because that loads the models.
    (concurrency.check if together else benchmark.check_setup)(setup, names)
    specs = specs_of(setup.bundle, setup.draft_bundle, setup.drafters)
    named = choose_devices(*specs, setup.config.device).named_in(setup.config.device)
    setup = replace(setup, config=replace(setup.config, device=named))
    return setup, names or default_modes(setup, together=together)


def _print_together(results: dict[str, Any]) -> None:
    from outrider_bench.report.page import span, times

    _print_setting(results)
    made = table("requests", "mode", "tokens/s", "range", "speed-up", "95%", "seconds", "end to end", "same")
    made.columns[1].justify = "left"
    for i, row in enumerate(results["summary"]):
        low, high = row["tokens_per_second_range"]
        again = i and results["summary"][i - 1]["num_requests"] == row["num_requests"]
        made.add_row(
            "" if again else str(row["num_requests"]),
            row["mode"],
            f"{row['tokens_per_second']:.1f}",
            f"{low:.1f}–{high:.1f}" if row["num_repeats"] > 1 else "-",
            times(row["speed_up"]),
            span(row["speed_up_interval"]),
            f"{row['seconds']:.2f}",
            times(row["end_to_end"]),
            f"{row['identical']}/{row['num_answers']}",
        )
    out.print(made)
    for failure in results["failures"]:
        level = failure["num_requests"]
        err.print(f"Failed: {failure['mode']}{f', {level} requests' if level else ''}: {failure['error']}")
    most, num_prompts = max(results["setting"]["concurrency"]), results["setting"]["num_prompts"]
    if most > num_prompts:
        err.print(f"{most} requests are more than the {num_prompts} prompts, so prompts ran several times.")


_HEADINGS = {
    "first token": "first\ntoken",
    "end to end": "end to\nend",
    "tokens/round": "tokens/\nround",
    "identical": "same",
}
_LEFT_OUT = ("quartiles", "reading", "seconds", "first token", "tokens/round", "accepted", "95%")  # in this order


def _print(results: dict[str, Any]) -> None:
    from outrider_bench.report.page import COLUMNS, cells, notes, verdict

    if said := verdict(results):
        out.print(said, style="bold")
    _print_setting(results)
    rows = [
        (mode["name"] if row["category"] == "all" else f"  {row['category']}", *cells(row))
        for mode in results["modes"]
        for row in reversed([row for row in results["summary"] if row["mode"] == mode["name"]])  # all categories first
    ]
    columns = ["mode", *COLUMNS]
    for column in (None, *_LEFT_OUT):
        if column:
            columns.remove(column)
        made = table(*(_HEADINGS.get(each, each) for each in columns))
        for row in rows:
            made.add_row(*(cell for each, cell in zip(("mode", *COLUMNS), row, strict=True) if each in columns))
        if made.fits(out.width):
            break
    out.print(made)
    if len(columns) < 1 + len(COLUMNS):
        left_out = ", ".join(column for column in COLUMNS if column not in columns)
        out.print(f"Left out, as the terminal is narrow: {left_out}. --out DIR writes a report with all.", style="dim")
    for title, sentences in notes(results).items():
        for sentence in sentences:
            err.print(f"{title}: {sentence}")


def _print_setting(results: dict[str, Any]) -> None:
    setting = results["setting"]
    if setting.get("temperature"):
        sampling = setting.get("sampling", "coupled")
        setting = setting | {"sampling": f"{sampling} (LOSSY)" if sampling in LOSSY else sampling}
    print_setting({key: value for key, value in setting.items() if key != "modes"})
    for mode in results["modes"]:
        out.print(f"{mode['name']}: {mode['description']}", style="dim")


def describe(engine: Engine, max_new_tokens: int | None, repeats: int) -> dict[str, Any]:
    """The setting of a measurement."""
    from outrider_bench.setting import describe_models, describe_processor, describe_versions

    return {
        **describe_models(engine.models),
        **engine.setting,
        **describe_processor(),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        **describe_versions(engine.models.values()),
    }
