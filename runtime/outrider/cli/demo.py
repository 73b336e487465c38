"""`outrider demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.hashes import list_files
from outrider.cli.console import out, print_json, table
from outrider.cli.export import Bars
from outrider.cli.generate import compare_as_dict, speed_up, verdict, warm_up
from outrider.cli.opening import load_model
from outrider.cli.options import json_option, trace_option, tracing
from outrider.config import Config
from outrider.config.files import user_path
from outrider.system import saved
from outrider.system.files import usable
from outrider.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.decoding.results import Result, TextChunk
    from outrider.engine.engine import Engine

MAX_NEW_TOKENS = 96
PROMPTS = {
    "rewrite": (
        "Rewrite this text with the name Maria instead of Peter:\n\n"
        "Peter lives in a small house by the sea. Every morning Peter walks along the beach with his dog. "
        "In the evening Peter reads a book in front of the fire."
    ),
    "list": (
        "Put these sentences into a numbered list:\n\n"
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
    """Fetch a small model, export it, and compare plain with speculative decoding.

    The model is SmolLM2-135M-Instruct with a small EAGLE-3 drafter. In every round, the controller chooses the faster
    of copies from the prompt, the drafter, or no draft.
    """
    folder = usable(user_path(cache_dir)) if cache_dir else saved.FOLDER
    bundle = demo_bundle(folder, quiet=as_json)
    # Both runs read the whole prompt.
    config = Config().replace(max_new_tokens=MAX_NEW_TOKENS, enable_prefix_caching=False, measure="first")
    engine = load_model(read_bundle(bundle), config)
    warm_up(engine, PROMPTS["list"], "auto", max_new_tokens=24)
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
    out.print(f"\nWith your own prompt: outrider generate {bundle} 'your prompt' --compare", soft_wrap=True)
    out.print(
        "With your own model: outrider chat MODEL.gguf (or a checkpoint folder, or a hub id such as Qwen/Qwen3-0.6B)"
    )


def _compare(engine: Engine, name: str, *, quiet: bool) -> tuple[Result, Result]:
    """Answer a prompt both ways, plainly first, and show both as they come unless `quiet`."""
    prompt = PROMPTS[name]
    if quiet:
        plain = engine.generate(prompt, drafter=None)
        return engine.generate(prompt), plain
    out.print(f"── {name}", style="bold")
    out.print(prompt, style="dim", markup=False)
    out.print()
    screen = Console(markup=False, emoji=False, highlight=False)
    with Columns("plain", "speculative", screen) as columns:
        plain = columns.show(engine.stream(prompt, drafter=None))
        result = columns.show(engine.stream(prompt))
    out.print(verdict(result, plain), style="bold green" if result.token_ids == plain.token_ids else "bold red")
    out.print()
    return result, plain


class Columns:
    """Answers side by side on a terminal, one after the other, each as it comes; elsewhere one below the other."""

    def __init__(self, left: str, right: str, screen: Console) -> None:
        self._titles, self._texts = [left, right], ["", ""]
        self._shown = 0
        self._screen = screen
        self._live = Live(console=screen, get_renderable=self._drawn, refresh_per_second=10)

    def __enter__(self) -> Self:
        if self._screen.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, chunks: Iterator[TextChunk]) -> Result:
        """Show an answer in the next column, and return it with its speed in the column's title."""
        place = self._shown
        self._shown += 1
        for chunk in chunks:
            self._texts[place] += chunk.text
            if chunk.result:
                self._titles[place] += f", {chunk.result.stats.tokens_per_second:.0f} tokens a second"
                if not self._screen.is_terminal:
                    out.print(f"[{self._titles[place]}]\n{self._texts[place]}\n")
                return chunk.result
        raise AssertionError("a stream ends with a result")

    def _drawn(self) -> Table:
        made = Table.grid(expand=True)
        panels = [
            Panel(Text(text), title=title, title_align="left", border_style="green" if place else "default")
            for place, (title, text) in enumerate(zip(self._titles, self._texts, strict=True))
        ]
        for _ in panels:
            made.add_column(ratio=1)
        made.add_row(*panels)
        return made


def demo_bundle(folder: Path, *, quiet: bool, drafter: bool = True) -> Path:
    """The demo's bundle in `folder`, made if it is missing or damaged. drafter: whether it has one of its own."""
    from outrider_export.bundles.bundle_cache import BundleCache, CachedSource
    from outrider_export.bundles.demo_model import DRAFTER, FILE, SHA256, fetch_demo_model
    from outrider_export.sources.content import absolute

    weights = "int8"
    drafter_files = [file.sha256 for file in list_files(DRAFTER)] if drafter else []
    key = {"version": __version__, "main": [SHA256, weights], "drafter": drafter_files}

    def make(output: Path) -> Bundle:
        from outrider_export import add_drafter, export_bundle

        made = export_bundle(fetch_demo_model(folder, bars), output=output, weights=weights, progress=bars)
        return add_drafter(made.folder, DRAFTER, progress=bars) if drafter else made

    with Bars(quiet=quiet) as bars:
        source = CachedSource("main", "gguf", str(absolute(folder / FILE)), SHA256)
        return BundleCache(folder).get("smollm2-135m-instruct", key, (source,), make, bars).folder
