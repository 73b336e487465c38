"""`outrider verify`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.bench import describe
from outrider.cli.console import out, print_json, progress_bar, table
from outrider.cli.options import json_option, load_options, read_options
from outrider.errors import OptionError, OutriderError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.bench.certify import Check, Subject
    from outrider.bench.prompts import Prompt
    from outrider.engine import Engine

CHECKS = ("batching", "greedy", "coupled", "sampling")


def _read_checks(_context: click.Context, _option: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(","))
    for name in names:
        if name not in CHECKS:
            raise click.BadParameter(f"There is no check '{name}'. {nearest(name, CHECKS)}")
    return names


@click.command()
@click.argument("bundle")
@click.option("--checks", callback=_read_checks, default=",".join(CHECKS), show_default=True, help="What to check.")
@click.option("--prompts", metavar="FILE", help="JSON Lines with 'turns' or 'prompt'.  [default: six of our own]")
@click.option("--per-category", type=click.IntRange(1), help="Use the first N prompts of each category.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=48, show_default=True, help="Length of each answer.")
@click.option("--context", type=click.IntRange(64), default=256, show_default=True, help="Tokens that batching reads.")
@click.option("--modes", help="Compare these with plain decoding, as draft:3,shuffled:8.  [default: all drafters]")
@click.option("--peer", type=click.Choice(["openvino-genai"]), help="Put another runtime to the same tests.")
@load_options
@json_option
def verify(
    bundle: str,
    checks: tuple[str, ...],
    prompts: str | None,
    per_category: int | None,
    max_new_tokens: int,
    context: int,
    modes: str | None,
    peer: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Certify that drafts do not change what BUNDLE says here.

    batching: the backend's logits, bit by bit, for every way to read the same tokens. greedy, coupled: text against
    plain decoding, for every drafter, several draft lengths, and both chosen at random every round. sampling: the
    joint distribution of sampled tokens against the exact one, enumerated on a built-in toy pair; how far the lossy
    modes are from it is reported. A correct sampler fails one such test in 10,000. The exit code is 1 if a check fails.
    """
    from outrider.bench import certify
    from outrider.bench.invariance import longest_context
    from outrider.bench.prompts import read_prompts
    from outrider.engine import load

    if modes and "genai" in modes:
        raise OptionError("--modes are Outrider's own. --peer openvino-genai puts openvino-genai to the same tests.")
    config = read_options(options)
    chosen = read_prompts(prompts, per_category)
    engine = load(bundle, config)
    made: list[Check] = []
    subjects: list[Subject] = []
    if {"greedy", "coupled"} & set(checks):
        subjects.append(certify.our_subject(engine, [name.strip() for name in modes.split(",")] if modes else []))
        subjects += [certify.genai_subject(engine)] if peer else []
    if "batching" in checks:
        longest = longest_context(engine.max_tokens)
        if context > longest:
            raise OptionError(
                f"--context {context:,} needs room for three sequences, and there is some for {max(longest, 0):,} "
                "tokens each. Lower it, or raise --cache-size."
            )
        made.append(certify.check_batching(engine.main, context))
    for subject in subjects:
        made += _identity(subject, engine, checks, chosen, max_new_tokens, quiet=as_json)
    if "sampling" in checks:
        with certify.toy_engine(config, engine.bundle.tokenizer_path if peer else None) as toy:
            made += certify.check_our_sampling(toy)
            made += certify.check_genai_sampling(toy) if peer else []
    failed = [check.name for check in made if check.passed is False and check.subject == "outrider"]
    setting = describe(engine, max_new_tokens, 1)
    if as_json:
        print_json({"passed": not failed, "setting": setting, "checks": [asdict(check) for check in made]})
    else:
        out.print("  ".join(f"{key}={value}" for key, value in setting.items()), style="dim")
        _print(made)
    if failed:
        raise OutriderError(f"Not certified on this device: {', '.join(failed)}.")


def _identity(
    subject: Subject,
    engine: Engine,
    checks: tuple[str, ...],
    prompts: list[Prompt],
    max_new_tokens: int,
    *,
    quiet: bool,
) -> list[Check]:
    from outrider.bench import certify

    # How often every prompt runs in every mode: greedily, and with two seeds.
    known: dict[str, tuple[int, Callable[..., Check]]] = {
        "greedy": (1, certify.check_greedy),
        "coupled": (2, certify.check_coupled),
    }
    asked = [known[name] for name in checks if name in known]
    runs = len(prompts) * len(subject.modes) * sum(times for times, _ in asked)
    with progress_bar(f"verifying {subject.name}", runs, quiet=quiet) as advance:
        return [check(subject, engine, prompts, max_new_tokens, advance) for _, check in asked]


def _print(checks: list[Check]) -> None:
    several = len({check.subject for check in checks}) > 1
    made = table(*(["runtime"] if several else []), "check", "result", "detail")
    for column in made.columns[1:]:
        column.justify = "left"
    made.columns[-1].no_wrap = False
    results = {True: "passed", False: "FAILED", None: "lossy"}
    for check in checks:
        made.add_row(*([check.subject] if several else []), check.name, results[check.passed], check.detail)
    out.print(made)
