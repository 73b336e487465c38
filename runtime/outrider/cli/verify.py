"""`outrider verify`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from outrider.cli.bench import describe
from outrider.cli.console import out, print_json, progress_bar, table
from outrider.cli.options import json_option, load_options, read_options
from outrider.errors import OutriderError


@click.command()
@click.argument("bundle")
@click.option("--prompts", metavar="FILE", help="JSON Lines with 'turns' or 'prompt'.  [default: six of our own]")
@click.option("--per-category", type=click.IntRange(1), help="Use the first N prompts of each category.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=48, show_default=True, help="Length of each answer.")
@load_options
@json_option
def verify(
    bundle: str, prompts: str | None, per_category: int | None, max_new_tokens: int, as_json: bool, **options: Any
) -> None:
    """Certify that drafts do not change what BUNDLE says here.

    Greedy and coupled text against plain decoding, for every drafter and several draft lengths; rejection sampling
    against the exact distribution of a built-in toy; the backend's logits bit by bit. The exit code is 1 if one fails.
    """
    from outrider.bench import certify
    from outrider.bench.prompts import read_prompts
    from outrider.engine import load

    config = read_options(options)
    chosen = read_prompts(prompts, per_category)
    engine = load(bundle, config)
    runs = len(chosen) * len(engine.drafters) * len(certify.LENGTHS)
    with progress_bar("verifying", 3 * runs, quiet=as_json) as advance:
        checks = [
            certify.check_batching(engine.main, engine.bundle.manifest.main.vocab_size),
            certify.check_greedy(engine, chosen, max_new_tokens, advance),
            certify.check_coupled(engine, chosen, max_new_tokens, advance=advance),
            certify.check_rejection(config),
        ]
    setting = describe(engine, max_new_tokens, 1)
    passed = all(check.passed for check in checks)
    if as_json:
        print_json({"passed": passed, "setting": setting, "checks": [asdict(check) for check in checks]})
    else:
        out.print("  ".join(f"{key}={value}" for key, value in setting.items()), style="dim")
        made = table("check", "result", "detail")
        made.columns[2].justify, made.columns[2].no_wrap = "left", False
        for check in checks:
            made.add_row(check.name, "passed" if check.passed else "FAILED", check.detail)
        out.print(made)
    if not passed:
        failed = ", ".join(check.name for check in checks if not check.passed)
        raise OutriderError(f"Not certified on this device: {failed}.")
