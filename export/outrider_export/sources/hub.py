"""Downloads a checkpoint from the Hugging Face hub: configuration, tokenizer and safetensors, nothing else.

Files go to the hub's own cache, which other programs share. huggingface_hub handles tokens for gated models:
`hf auth login`, or HF_TOKEN.
"""

from __future__ import annotations

import importlib
import queue
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.errors import ExportError
from outrider_export.progress import Progress
from outrider_export.sources.gguf_shards import first_files, shards_of, whole_name

# An allow-list: pickled weights (*.bin, *.pt, *.pth, *.ckpt) are never downloaded.
ALLOWED = ("*.json", "*.jinja", "*.model", "*.spm", "*.safetensors")
ALLOWED_WITH_CODE = (*ALLOWED, "*.py")
# Sub-folders hold other formats: onnx/, openvino/, original/. All but additional_chat_templates/ are left out.
ELSEWHERE = ("[!a]*/*", "a[!d]*/*", "ad[!d]*/*")


Advance = Callable[[int], None]  # called with the number of new bytes
Begin = Callable[[int | None], None]  # the download begins; its size in bytes, if known


class _Cancelled(Exception):
    """Ends the download's own threads after Ctrl-C."""


def download(
    repo_id: str, revision: str | None, trust_remote_code: bool, progress: Progress, only: tuple[str, ...] | None = None
) -> tuple[Path, str]:
    """The folder with the checkpoint, and the commit of `revision`.

    only: patterns of files to download instead of the checkpoint's, sub-folders included.

    Raises:
        ExportError: if the id is unknown or gated, or the hub cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub.errors import DryRunError

    options: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": list(only or (ALLOWED_WITH_CODE if trust_remote_code else ALLOWED)),
        "ignore_patterns": [] if only else list(ELSEWHERE),
    }

    def fetch(advance: Advance, begin: Begin) -> Path:
        size = None
        try:
            files = huggingface_hub.snapshot_download(repo_id, dry_run=True, tqdm_class=_bar(None), **options)
        except DryRunError:
            pass  # the hub cannot be reached: the call below finds the files in the cache, or reports the error
        else:
            size = sum(file.file_size for file in files if file.will_download)
            _check_space(repo_id, size)
            if files:  # a branch that moves meanwhile must not mix two versions
                options["revision"] = files[0].commit_hash
        begin(size or None)
        return Path(huggingface_hub.snapshot_download(repo_id, tqdm_class=_bar(advance), **options))

    try:
        folder = _interruptible(fetch, progress)
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(_explain(repo_id, revision, error)) from error
    return folder, folder.name


def download_gguf(repo_id: str, folder: Path, tag: str, progress: Progress) -> Path | None:
    """The first file of the GGUF model in a repository that has a tag in its name; None without a GGUF file.

    folder: what `download` returned. tag: "" takes the only one, or Q4_K_M, as llama.cpp does.

    Raises:
        ExportError: if there are several, or none with this tag, or the download fails.
    """
    import huggingface_hub

    commit = folder.name
    try:
        names = huggingface_hub.HfApi().list_repo_files(repo_id, revision=commit)
    except Exception as error:
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]  # downloaded before
        if tag and not names:
            raise ExportError(_explain(repo_id, commit, error)) from error
    first = choose_gguf(repo_id, names, tag)
    if first is None:
        return None
    files = tuple(path.as_posix() for path in shards_of(Path(first)))
    return download(repo_id, commit, False, progress, files)[0] / first


def choose_gguf(repo_id: str, names: list[str], tag: str) -> str | None:
    """The first file of the model that `download_gguf` takes among a repository's files. Raises as it does."""
    models = {path.as_posix(): whole_name(path.name) for path in first_files(map(Path, names))}
    if not models and not tag:
        return None
    wanted = re.compile(rf"(?<![a-z0-9]){re.escape(tag or 'Q4_K_M')}(?![a-z0-9_])", re.IGNORECASE)
    found = [first for first, name in models.items() if wanted.search(name)]
    if not tag and len(models) == 1:
        found = [*models]
    if len(found) != 1:
        count = f"{len(found)} models have" if found else "no model has"
        raise ExportError(
            f"{repo_id}: {count} {tag or 'Q4_K_M'} in the name. Name one by its quantization, as {repo_id}:Q8_0. It "
            f"has {', '.join(sorted(models.values())) or 'no GGUF file'}."
        )
    return found[0]


def _interruptible(work: Callable[[Advance, Begin], Path], progress: Progress) -> Path:
    """Run `work` in a thread and relay its progress, so that Ctrl-C does not wait for the current file."""
    events: queue.Queue[tuple[str, Any]] = queue.Queue()
    cancelled = threading.Event()

    def advance(count: int) -> None:
        if cancelled.is_set():
            raise _Cancelled
        events.put(("advance", count))

    def run() -> None:
        try:
            events.put(("done", work(advance, lambda size: events.put(("begin", size)))))
        except BaseException as error:  # raised again by the caller's thread
            events.put(("failed", error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while True:
            try:
                kind, value = events.get(timeout=0.2)
            except queue.Empty:
                continue
            if kind == "begin":
                progress.phase("download", value)
            elif kind == "advance":
                progress.advance(value)
            elif kind == "done":
                return Path(value)
            else:
                raise value
    finally:
        cancelled.set()


def _bar(advance: Advance | None) -> type[Any]:
    """A progress bar class for huggingface_hub that draws nothing and reports bytes."""
    tqdm: Any = importlib.import_module("tqdm").tqdm  # untyped, as huggingface_hub's own

    def begin(self: Any, *args: Any, **options: Any) -> None:
        self.counts_bytes = options.get("unit") == "B"
        tqdm.__init__(self, *args, **{**options, "disable": True})

    def update(self: Any, n: float | None = 1) -> None:
        if advance and self.counts_bytes and n:
            advance(int(n))

    return type("Bar", (tqdm,), {"__init__": begin, "update": update})


def _check_space(repo_id: str, size: int) -> None:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    if size > (free := shutil.disk_usage(existing).free):
        raise ExportError(
            f"{repo_id} is {size / 1e9:.1f} GB to download and {existing} has {free / 1e9:.1f} GB free. "
            "Make room, or set HF_HOME to a larger disk."
        )


def _explain(repo_id: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{repo_id} is gated. Accept its terms on huggingface.co/{repo_id}, then run 'hf auth login'."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo_id} has no revision {revision!r}. Look at huggingface.co/{repo_id}/commits."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"There is no {repo_id}, neither here nor on the hub, or it is private. Check the spelling; for a private "
            "model run 'hf auth login'."
        )
    if isinstance(error, errors.HFValidationError):
        return f"{repo_id} is not a hub id that the hub accepts. A hub id looks like org/name."
    if isinstance(error, (errors.LocalEntryNotFoundError, OSError)) or type(error).__module__.startswith("httpx"):
        return (
            f"There is no path {repo_id} here, and the hub cannot be reached to download a model of that name. "
            "Check the connection, or name a local folder or .gguf file."
        )
    return f"{repo_id} cannot be downloaded: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
