"""`outrider export`."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import click
from rich.console import RenderableType
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.manifest import MANIFEST_NAME
from outrider.cli.console import err, out, print_json
from outrider.cli.options import json_option
from outrider.config.files import user_path
from outrider.errors import ExportError, OptionError, nearest, needs
from outrider.system import saved
from outrider.system.files import usable

SERVERS = ("ovms",)

_SERVED = ("drafter", "main_device", "draft_device", "cache_size", "draft_cache_size")  # options of a repository


def pop_serving(server: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Take what was given of a repository's options out of all, for `outrider_export.Serving`.

    Raises:
        OptionError: for an unknown server, or these options without one.
    """
    given = {name: value for name in _SERVED if (value := options.pop(name)) is not None}
    if server is not None and server not in SERVERS:
        raise OptionError(f"--for {server} is not a server that the export supports. {nearest(server, SERVERS)}")
    if server is None and given:
        name = next(iter(given)).replace("_", "-")
        raise OptionError(f"--{name} is an option of a model repository. Give it with --for ovms, or leave it out.")
    if given.get("drafter") == "none":
        given["drafter"] = None
    return given


_DRAFT = "Draft model, of the same kinds as MAIN; auto finds one; none leaves out an MTP module that MAIN has."
_WEIGHTS = "int8, int4, fp16, fp32, or keep for a GGUF file's own; for ONNX int8, int4 or fp32"


@click.command()
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
    help="Without --format and --weights, take the fastest form on this CPU that loses little; no: the defaults above.",
)
@click.option("--draft-vocab", metavar="N|all", help="How many different tokens the draft model proposes.")
@click.option("--draft-vocab-corpus", metavar="FILE", help="Choose these tokens by a text that resembles your answers.")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of MAIN on the hub.")
@click.option("--draft-revision", metavar="NAME", help="The same for the draft model.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with a checkpoint.")
@click.option("--overwrite", is_flag=True, help="Replace an existing bundle once the new one is complete.")
@click.option("--for", "server", metavar="SERVER", help="Make a model repository for a server: ovms.")
@click.option("--drafter", metavar="NAME", help="For ovms: a drafter of the bundle, ngram or none.  [default: auto]")
@click.option("--main-device", metavar="DEVICE", help="For ovms: device of the main model.  [default: CPU]")
@click.option("--draft-device", metavar="DEVICE", help="For ovms: device of the draft model.  [default: the same]")
@click.option("--cache-size", type=int, help="For ovms: GB of the KV cache; 0: it grows as needed.  [default: 0]")
@click.option("--draft-cache-size", type=int, help="For ovms: GB of the draft model's cache.  [default: the same]")
@json_option
def export(main: str, draft: str | None, output: str | None, server: str | None, as_json: bool, **options: Any) -> None:
    """Make a bundle of MAIN and a draft model.

    MAIN is a Hugging Face hub id, a checkpoint folder or a .gguf file. With --for ovms, a repository for OpenVINO Model
    Server is made instead; then MAIN may also be a bundle.
    """
    serving = pop_serving(server, options)
    with needs("The export half of outrider is not installed", "export", ExportError):
        from outrider_export import default_output, export_bundle
        from outrider_export.bundle_cache import BundleCache
        from outrider_export.find_draft import find_draft
    if draft == "auto":
        with Bars(quiet=as_json) as bars:
            found = find_draft(main, BundleCache(saved.FOLDER), bars, options["format"] or "openvino")
        draft = None if found is None else str(found)
    if server is not None:
        serve(main, draft, output, serving, options, as_json)
        return
    output = output or str(default_output(main, draft))
    make(lambda bars: export_bundle(main, draft, output=output, progress=bars, **options), output, as_json)


def serve(
    main: str, draft: str | None, output: str | None, serving: dict[str, Any], options: dict[str, Any], as_json: bool
) -> None:
    """Write a repository for OpenVINO Model Server, of a bundle, or of what bundles are made of."""
    from outrider_export import Serving, default_output, export_bundle, write_for_ovms

    options["for_this_machine"] = False  # the server runs OpenVINO, elsewhere perhaps

    is_bundle = (usable(user_path(main)) / MANIFEST_NAME).is_file()
    name = user_path(main).resolve().name if is_bundle else default_output(main, draft).name
    folder = usable(user_path(output or f"{name}-ovms"))
    if folder.exists() or options.pop("overwrite"):
        raise ExportError(f"--for ovms makes a new folder, and {folder} exists. Choose a new name with -o.")
    beside = folder.parent if folder.parent.is_dir() else None  # a disk with room for the models
    with terminable(), Bars(quiet=as_json) as bars, tempfile.TemporaryDirectory(dir=beside) as scratch:
        if is_bundle:
            _check_none_given(main, {"draft": draft, **options})
            bundle = read_bundle(user_path(main))
        else:
            bundle = export_bundle(main, draft, output=Path(scratch, name), progress=bars, **options)
        write_for_ovms(bundle, folder, name, Serving(**serving))
        if adapters := ", ".join(adapter.name for adapter in bundle.manifest.adapters):
            bars.note(f"The bundle's adapters ({adapters}) are not written. Export a model with one merged: --adapter.")
    if as_json:
        print_json({"repository": str(folder), "model": name, "notes": bars.notes})
        return
    out.print(f"{folder}: a model repository with '{name}'.")
    out.print(f"Serve it: ovms --rest_port 8000 --config_path {folder / 'config.json'}", soft_wrap=True)


def _check_none_given(bundle: str, options: dict[str, Any]) -> None:
    """Check that a bundle, which is not converted again, is given without options of conversion."""
    for name, value in options.items():
        if value not in (None, False):
            raise OptionError(
                f"--{name.replace('_', '-')} is not for {bundle}, which is a bundle already. Leave it out."
            )


def make(work: Callable[[Bars], Bundle], output: str, as_json: bool) -> None:
    """Make a bundle at `output`, with progress, and describe it."""
    from outrider.models.backends.processor import find_processor, lacks_int8_products  # imports OpenVINO

    with terminable(), Bars(quiet=as_json) as bars:
        bundle = work(bars)
    manifest = bundle.manifest
    size = sum(file.size for file in manifest.files)
    if as_json:
        models = {"main": manifest.main} | {drafter.name: drafter.model for drafter in manifest.drafters}
        weights = {name: model.weights for name, model in models.items()}
        print_json({"bundle": str(bundle.folder), "bytes": size, "weights": weights, "notes": bars.notes})
        return
    draft = "no draft model"
    if manifest.drafters:
        first = manifest.drafters[0]
        draft = f"{'draft model' if first.kind == 'draft_model' else first.kind} in {first.model.weights}"
    out.print(f"{output}: {size / 1e9:.2f} GB, main model in {manifest.main.weights}, {draft}.")
    encoder = manifest.main.encoder
    try_it = f"generate {output} 'Write a haiku about sledges'"
    if encoder is not None:
        try_it = f"transcribe {output} talk.wav" if encoder.kind == "audio" else f"generate {output} 'A text to read'"
    out.print(f"Try it: outrider {try_it}", soft_wrap=True)
    has_onnx = manifest.main.format == "openvino" and not manifest.main.geometry.layer_states
    if has_onnx and lacks_int8_products(find_processor()):
        out.print(
            "This processor has no products of 8-bit numbers, so that int4 in ONNX may be faster: "
            "'outrider tune MODEL --weights' measures that.",
            soft_wrap=True,
        )


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
        columns = (TextColumn("{task.description:<15}"), BarColumn(), TimeElapsedColumn(), _Size())
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


class _Size(ProgressColumn):
    """Bytes done and in all, for phases that count bytes."""

    def render(self, task: Task) -> Text:
        if task.total is None or task.total <= 1:
            return Text("")
        return Text(f"{decimal(int(task.completed))} of {decimal(int(task.total))}", style="progress.download")
