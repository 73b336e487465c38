"""`outrider tune`."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.bench import describe
from outrider.cli.console import err, out, print_json, print_setting, progress_bar, table
from outrider.cli.opening import load_model, model_argument, open_model
from outrider.cli.options import (
    generation_options,
    json_option,
    load_options,
    prompt_options,
    read_options,
)
from outrider.cli.progress import progress_line
from outrider.errors import OptionError, nearest

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.models.tuning.setting import Choice
    from outrider_bench.prompts import BenchPrompt


LONGEST = 8
MINUTES = 2.0
REPEATS, _FEWEST_REPEATS = 15, 3  # of every timed call, in a quarter of the time


@click.command()
@model_argument
@prompt_options
@click.option(
    "--search",
    is_flag=True,
    help="First try the settings of each model, with fewer threads too. The fastest that are exact are saved. "
    "Takes minutes.",
)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), help="About how long to measure.  [default: 2]")
@load_options
@generation_options
@json_option
def tune(
    bundle: str,
    draft: str | None,
    prompts: str | None,
    per_category: int | None,
    search: bool,
    minutes: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure the cost of calls and the gain of drafting on this machine.

    MODEL is a bundle, a .gguf file, a checkpoint folder or a hub id. The costs are saved; num_assistant_tokens=auto
    uses them. It is compared with fixed numbers of draft tokens of one drafter: that of --drafter, the bundle's own, or
    the suffix drafter. In the time of --minutes fit fewer prompts, shorter answers or fewer numbers of draft tokens
    where calls are slow; what is given by an option stays.
    """
    from outrider.engine.opening import open_draft_bundle
    from outrider.models.tuning.loading import search_settings
    from outrider_bench.prompts import read_prompts
    from outrider_bench.verify.fitting import fit_prompts

    if options.get("num_assistant_tokens") is not None:
        raise OptionError(f"tune varies --num-assistant-tokens from 1 to {LONGEST}: leave it out.")
    config = read_options(options, max_new_tokens=64, measure="first")
    if config.generation.drafter is None:
        raise OptionError("--drafter none leaves nothing to tune. Name a drafter, or leave the option out.")
    chosen = read_prompts(prompts, per_category)
    opened = open_model(bundle, draft, quiet=as_json, config=config)
    if search:
        with progress_line("Trying settings.", quiet=as_json):
            search_settings(opened, open_draft_bundle(opened, config.device), config.device)
    engine = load_model(opened, config, enable_prefix_caching=False)  # every run reads its whole prompt
    drafter = _drafter_of(engine)
    length = config.generation.max_new_tokens or 0
    chosen, _ = fit_prompts(engine, chosen, length)
    seconds = 60 * (minutes or MINUTES)
    with progress_line("Timing the models' calls.", quiet=as_json):
        engine.measure_costs(_repeats(engine, seconds / 4))  # what fits is planned with these
    work = Work(len(chosen), length, tuple(range(1, LONGEST + 1)))
    are_given = prompts is not None or per_category is not None
    work = work.within(seconds * 3 / 4, engine, keep_prompts=are_given, keep_length=options.get("max_new_tokens"))
    rows = _measure(work, chosen, engine, drafter, quiet=as_json)
    best = max(rows, key=lambda row: row["speed_up"])
    setting = describe(engine, work.length, 1)
    name = config.generation.drafter if best["num_assistant_tokens"] == "auto" else drafter
    if as_json:
        costs = {role: asdict(cost) for role, cost in engine.costs.items()}
        choices = {role: asdict(choice) for role, choice in engine.choices.items()}
        figures = {"setting": setting, "choices": choices, "costs": costs, "drafter": drafter}
        print_json(figures | {"rows": rows, "best": best["num_assistant_tokens"]})
        return
    print_setting(setting)
    _print_choices(engine)
    _print_costs(engine)
    _print_rows(rows, f"Drafter {drafter}; auto chooses among {', '.join(engine.drafters)}")
    if best["num_assistant_tokens"]:
        out.print(f"\nBest on these prompts: drafter={name}, num_assistant_tokens={best['num_assistant_tokens']}.")
    else:
        out.print("\nPlain decoding was the fastest on these prompts: use drafter=none here.")


def _drafter_of(engine: Engine) -> str:
    """The drafter whose numbers of draft tokens are compared."""
    wanted = engine.config.generation.drafter
    is_named = wanted not in ("auto", None)
    drafter = str(wanted) if is_named else next(iter(engine.bundled_drafters), "suffix")
    if drafter not in engine.drafters:
        raise OptionError(f"There is no drafter '{drafter}' here. {nearest(drafter, engine.drafters)}")
    return drafter


def _measure(
    work: Work, prompts: list[BenchPrompt], engine: Engine, drafter: str, *, quiet: bool
) -> list[dict[str, Any]]:
    """What plain decoding, the engine's own drafter and each number of draft tokens reach: a row each."""
    from outrider_bench.modes.make import make_modes
    from outrider_bench.prompts import encode_prompts
    from outrider_bench.report.summary import collect, summarize
    from outrider_bench.runs.measure import measure, warm_up

    chosen = prompts[: work.num_prompts]
    generation = engine.config.generation.replace(max_new_tokens=work.length)
    names = ["plain", str(generation.drafter), *(f"{drafter}:{n}" for n in work.lengths)]
    modes = make_modes(names, engine, forgets=True)
    tasks = encode_prompts(chosen, engine.tokenizer)
    if not quiet:
        _announce(work, engine, drafter)
    with progress_bar("answers measured", len(chosen) * len(modes), quiet=quiet) as advance:
        warm_up(modes, tasks, generation)
        records = measure(modes, tasks, generation, record=lambda _: advance())
    summary = summarize(collect(records), tasks, [mode.name for mode in modes], "plain")
    found = (row for row in summary if row["category"] == "all")
    counts = (0, "auto", *work.lengths)
    return [row | {"num_assistant_tokens": n} for n, row in zip(counts, found, strict=True)]


def _print_choices(engine: Engine) -> None:
    """The models' settings, and what was tried."""
    for role, choice in engine.choices.items():
        out.print(f"{role} model: {choice.setting.description if role == 'main' else choice.setting}", style="dim")
        if choice.trials:
            _print_trials(role, choice)


def _print_costs(engine: Engine) -> None:
    """What calls cost."""
    for role, cost in engine.costs.items():
        headings = (f"after {context:,} tokens" for context in cost.contexts)
        made = table("tokens", *headings, title=f"{role} model: milliseconds of a call, by its number of tokens")
        for count, *seconds in zip(cost.rows, cost.near, cost.far, strict=True):
            made.add_row(str(count), *(f"{1000 * each:.1f}" for each in seconds))
        out.print(made)
        out.print()


def _print_rows(rows: list[dict[str, Any]], title: str) -> None:
    """What drafting gained, by the number of draft tokens."""
    out.print(
        "accepted: share of draft tokens that the main model kept. tokens/round: tokens per call of the main model. "
        "speed-up: tokens/s as a multiple of plain decoding's; slowest prompt: the lowest speed-up.\n",
        style="dim",
    )
    columns = ("draft tokens", "accepted", "tokens/round", "tokens/s", "speed-up", "slowest prompt")
    made = table(*columns, title=title)
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


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured: prompts, each answered in `length` tokens without drafts, by auto and in `lengths` ways."""

    num_prompts: int
    length: int
    lengths: tuple[int, ...]

    def seconds(self, engine: Engine) -> float:
        """About how long it takes where drafts gain nothing, with one prompt in each mode to warm up."""
        answers = (self.num_prompts + 1) * (2 + len(self.lengths))
        return answers * self.length * engine.costs["main"](1)

    def within(self, seconds: float, engine: Engine, *, keep_prompts: object, keep_length: object) -> Work:
        """The most of it that fits in so many seconds; the least if nothing does."""
        prompts = [self.num_prompts] if keep_prompts else range(min(2, self.num_prompts), self.num_prompts + 1)
        answers = [self.length] if keep_length else [min(self.length, n) for n in (24, 32, 48, 64)]
        choices = [
            Work(num_prompts, length, lengths)
            for num_prompts in prompts
            for length in answers
            for lengths in (self.lengths, (1, 2, 4, 8), (2, 5))
        ]
        choices.sort(key=lambda each: each.seconds(engine))
        return [choices[0], *(each for each in choices if each.seconds(engine) <= seconds)][-1]


def _repeats(engine: Engine, seconds: float) -> int:
    """How often each call is timed in so many seconds."""
    of_each_once = sum(sum(cost.near) + sum(cost.far) for cost in engine.costs.values())
    return max(min(REPEATS, int(seconds / max(of_each_once, 1e-9))), _FEWEST_REPEATS)


def _announce(work: Work, engine: Engine, drafter: str) -> None:
    """Say what will be measured, and about how long that takes."""
    counts = ", ".join(map(str, work.lengths))
    num_modes = 2 + len(work.lengths)
    err.print(
        f"tune answers {work.num_prompts} prompts in {num_modes} modes: plain decoding, "
        f"{engine.config.generation.drafter}, and {counts} draft tokens of {drafter}. That is "
        f"{work.num_prompts * num_modes} answers of up to {work.length} tokens, about "
        f"{max(round(work.seconds(engine) / 60), 1)} min. --minutes measures longer."
    )


def _print_trials(role: str, choice: Choice) -> None:
    """The settings of a model that were tried."""
    counts = sorted({count for trial in choice.trials for count in trial.seconds})
    title = f"{role} model: tried, milliseconds to read {', '.join(map(str, counts))} tokens"
    made = table("setting", *(f"{n}" for n in counts), "result", title=title, text=1)
    for trial in choice.trials:
        made.add_row(
            str(trial.setting),
            *(f"{1000 * trial.seconds[n]:.1f}" if n in trial.seconds else "-" for n in counts),
            trial.failure or ("chosen" if trial.setting == choice.setting else "not enough faster"),
        )
    out.print(made)
    out.print()
