"""`outrider demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider import saved
from outrider.cli.console import out, print_json, table
from outrider.cli.export import Bars
from outrider.cli.generate import compare_as_dict, print_stream, speed_up, verdict, warm_up
from outrider.cli.options import json_option, trace_option, tracing
from outrider.config.files import user_path
from outrider.errors import BundleError
from outrider.files import usable

if TYPE_CHECKING:
    from outrider.engine import Engine
    from outrider.results import Result

MAX_NEW_TOKENS = 96
PROMPTS = {
    "rewrite": (
        "Rewrite this text with the name Maria instead of Peter:\n\n"
        "Peter lives in a small house by the sea. Every morning Peter walks along the beach with his dog. "
        "In the evening Peter reads a book in front of the fire."
    ),
    "extract": (
        "Extract all names and places from this text as a list: "
        "Anna Keller was born in Zurich in 1871. She studied in Vienna with Otto Wagner and later moved to Budapest, "
        "where she met Miklos Szabo. Together they built the Elisabeth Bridge."
    ),
    "fix code": (
        "Fix the bug in this Python function and print the fixed function:\n\n"
        "```python\ndef average(numbers):\n    total = 0\n    for number in numbers:\n        total = total + number\n"
        "    return total / len(number)\n```"
    ),
    "free text": "Write a short letter to a friend about your first day at a new school.",
}


@click.command()
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Folder for the model and the bundle.")
@trace_option
@json_option
def demo(cache_dir: Path | None, trace: str | None, as_json: bool) -> None:
    """Fetch a small model, export it, and show plain against speculative decoding.

    SmolLM2-135M-Instruct with a small EAGLE-3 drafter, and copies from the prompt. The controller takes what pays,
    round by round: copies where the answer repeats the prompt, the drafter elsewhere.
    """
    from outrider.engine import load

    folder = usable(user_path(cache_dir)) if cache_dir else saved.FOLDER
    bundle = demo_bundle(folder, quiet=as_json)
    # Both runs read the whole prompt.
    engine = load(bundle, max_new_tokens=MAX_NEW_TOKENS, enable_prefix_caching=False)
    warm_up(engine, PROMPTS["extract"], "auto", max_new_tokens=24)
    with tracing(engine, trace):
        compared = {name: _compare(engine, name, quiet=as_json) for name in PROMPTS}
    if as_json:
        answers: dict[str, Any] = {
            name: result.as_dict() | {"compare": compare_as_dict(result, plain)}
            for name, (result, plain) in compared.items()
        }
        print_json({"bundle": str(bundle), "answers": answers})
        return
    made = table("tokens per second", "plain", "speculative", "speed-up", "tokens/round", "accepted", "same text")
    for name, (result, plain) in compared.items():
        made.add_row(
            name,
            f"{plain.stats.tokens_per_second:.0f}",
            f"{result.stats.tokens_per_second:.0f}",
            f"{speed_up(result, plain):.2f}×",
            f"{result.stats.tokens_per_round:.2f}",
            f"{result.stats.num_accepted_tokens}/{result.stats.num_draft_tokens}",
            "yes" if result.token_ids == plain.token_ids else "NO",
        )
    out.print(made)
    out.print(f"\nTry your own: outrider generate {bundle} 'your prompt' --compare")


def _compare(engine: Engine, name: str, *, quiet: bool) -> tuple[Result, Result]:
    """Answer a prompt both ways, and print it unless `quiet`."""
    prompt = PROMPTS[name]
    if quiet:
        return engine.generate(prompt), engine.generate(prompt, drafter=None)
    out.print(f"── {name}", style="bold")
    out.print(prompt, style="dim", markup=False)
    out.print()
    result = print_stream(engine.stream(prompt))
    plain = engine.generate(prompt, drafter=None)
    out.print(verdict(result, plain), style="bold green" if result.token_ids == plain.token_ids else "bold red")
    out.print()
    return result, plain


def demo_bundle(folder: Path, *, quiet: bool, drafter: bool = True) -> Path:
    """The demo's bundle in `folder`, made if it is missing or damaged. drafter: whether it has one of its own."""
    from outrider.bundle.folder import read_bundle

    bundle = folder / ("smollm2-135m-instruct" if drafter else "smollm2-135m-instruct-alone")
    try:
        found = read_bundle(bundle)
        if not drafter or found.manifest.drafters:
            return found.folder
    except BundleError:
        pass
    from outrider_export import add_drafter, export_bundle
    from outrider_export.demo_model import DRAFTER, fetch_demo_model

    with Bars(quiet=quiet) as bars:
        checkpoint = fetch_demo_model(folder, bars)
        # Weights are not converted, because that needs torch, which a plain installation does not have.
        export_bundle(checkpoint, output=bundle, weights="keep", overwrite=True, progress=bars)
        if drafter:
            add_drafter(bundle, DRAFTER, progress=bars)
    return bundle
