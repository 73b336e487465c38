"""`outrider export`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import click
from rich.console import RenderableType
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from outrider.bundle.folder import Bundle
from outrider.cli.console import err, out, print_json
from outrider.cli.options import export_half, json_option
from outrider.system import saved

_DRAFT = "Draft model, of the same kinds as MAIN; auto finds one; none leaves out an MTP module that MAIN has."
_WEIGHTS = "int8, int4, fp16 or fp32; for ONNX int8, int4 or fp32"


@click.command(context_settings={"allow_extra_args": True})
@click.argument("main")
@click.option("--draft", metavar="DRAFT", help=_DRAFT)
@click.option("--adapter", metavar="FOLDER", help="LoRA adapter in PEFT's format to merge into MAIN.")
@click.option("-o", "--output", metavar="BUNDLE", help="Folder to make.  [default: named after MAIN]")
@click.option("--format", metavar="FORMAT", help="Model format: openvino or onnx.  [default: openvino]")
@click.option("--draft-format", metavar="FORMAT", help="The same for the draft model.  [default: as --format]")
@click.option("--weights", metavar="FORMAT", help=f"{_WEIGHTS}.  [default: int8]")
@click.option(
    "--draft-weights", metavar="FORMAT", help="The same for the draft model.  [default: int4, or int8 below 0.2B]"
)
@click.option(
    "--for-this-machine",
    type=bool,
    metavar="yes|no",
    default=True,
    help="Without --format and --weights, take the form that wins on CPUs like this one; no: the defaults above.",
)
@click.option(
    "--draft-vocab",
    metavar="N|all",
    help="How many different tokens the draft model proposes; by default as many as pay.",
)
@click.option("--draft-vocab-corpus", metavar="FILE", help="Choose these tokens by a text that resembles your answers.")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of MAIN on the hub.")
@click.option("--draft-revision", metavar="NAME", help="The same for the draft model.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with a checkpoint.")
@click.option("--overwrite", is_flag=True, help="Replace an existing bundle once the new one is complete.")
@json_option
def export(main: str, draft: str | None, output: str | None, as_json: bool, **options: Any) -> None:
    """Make a bundle of MAIN and a draft model.

    MAIN is a Hugging Face hub id, a checkpoint folder or a .gguf file.
    """
    if others := click.get_current_context().args:
        raise click.UsageError(f"The folder to make is an option: outrider export {main} -o {others[0]}")
    with export_half():
        from outrider_export import default_output, export_bundle
        from outrider_export.bundles.bundle_cache import BundleCache
        from outrider_export.bundles.find_draft import find_draft
    if draft == "auto":
        with Bars(quiet=as_json) as bars:
            found = find_draft(main, BundleCache(saved.FOLDER), bars, options["format"] or "openvino")
        draft = None if found is None else str(found)
    output = output or str(default_output(main, draft))
    make(lambda bars: export_bundle(main, draft, output=output, progress=bars, **options), output, as_json)


def make(work: Callable[[Bars], Bundle], output: str, as_json: bool) -> None:
    """Make a bundle at `output`, with progress, and describe it."""

    with terminable(), Bars(quiet=as_json) as bars:
        bundle = work(bars)
    manifest = bundle.manifest
    if as_json:
        models = {"main": manifest.main} | {drafter.name: drafter.model for drafter in manifest.drafters}
        weights = {name: model.weights for name, model in models.items()}
        print_json({"bundle": str(bundle.folder), "bytes": manifest.size, "weights": weights, "notes": bars.notes})
        return
    draft: str = "no draft model" if manifest.main.text_encoder is None else manifest.main.text_encoder.kind
    if manifest.drafters:
        first = manifest.drafters[0]
        draft = f"{'draft model' if first.kind == 'draft_model' else first.kind} in {first.model.weights}"
    out.print(f"{output}: {manifest.size / 1e9:.2f} GB, main model in {manifest.main.weights}, {draft}.")
    if (text_encoder := manifest.main.text_encoder) is not None:
        what, path = ("embeddings", "embeddings") if text_encoder.kind == "embedding" else ("rankings", "rerank")
        out.print(f"Serve its {what}, beside models that write: outrider serve MODEL {output} (POST /v1/{path})")
        return
    encoder = manifest.main.encoder
    try_it = f"generate {output} 'Write a haiku about sledges'"
    if encoder is not None:
        try_it = f"transcribe {output} talk.wav" if encoder.kind == "audio" else f"generate {output} 'A text to read'"
    out.print(f"Try it: outrider {try_it}", soft_wrap=True)


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM clean up as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Bars:
    """Draws an export's progress on a terminal, one line per phase, and prints its notes."""

    def __init__(self, *, quiet: bool) -> None:
        self.notes: list[str] = []
        columns = (TextColumn("{task.description:<15}"), _Bar(), TimeElapsedColumn(), _Size())
        self._bars = _Bars(*columns, console=err, disable=quiet or not err.is_terminal)
        self._quiet = quiet
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._end()
        self._bars.line = ""
        self._bars.stop()

    def phase(self, name: str, total: int | None = None) -> None:
        """Begin a line."""
        self._end()
        self._bars.start()  # at the first phase, not earlier
        self._task = self._bars.add_task(name, total=total)

    def advance(self, count: int) -> None:
        """Advance the bar by `count` bytes."""
        if self._task is not None:
            self._bars.advance(self._task, count)

    def note(self, text: str) -> None:
        """Print a line of its own."""
        self.notes.append(text)
        if not self._quiet:
            err.print(text, soft_wrap=not err.is_terminal)

    @property
    def status(self) -> Callable[[str], None] | None:
        """Shows a line in place of the one before, cut to the width; None without a terminal."""
        return None if self._bars.disable else self._bars.show

    def _end(self) -> None:
        if self._task is None:
            return
        task = self._bars.tasks[self._task]
        # A phase of unknown length gets a full bar without a size.
        self._bars.update(self._task, total=task.total or 1, completed=task.total or 1)
        self._bars.stop_task(self._task)
        self._task = None


class _Bars(Progress):
    """Bars, and below them a line."""

    line = ""

    def show(self, line: str) -> None:
        """Show a line in place of the one before."""
        self.line = line
        self.start()

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.tasks:
            yield self.make_tasks_table(self.tasks)
        if self.line:
            yield Text(self.line, no_wrap=True, overflow="ellipsis")


class _Bar(BarColumn):
    """A bar for what goes on."""

    def render(self, task: Task) -> RenderableType:  # type: ignore[override]
        return Text("done", style="dim") if task.finished else super().render(task)


class _Size(ProgressColumn):
    """Bytes done and in all, for phases that count bytes."""

    def render(self, task: Task) -> Text:
        if task.total is None or task.total <= 1:
            return Text("")
        return Text(f"{decimal(int(task.completed))} of {decimal(int(task.total))}", style="progress.download")
