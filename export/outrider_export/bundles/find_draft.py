"""Finds a drafter for a model: `--draft auto`.

Looked at are the models beside the main model, those that bundles in the cache were made of, and the hub's local cache.
What has the main model's vocabulary fits, or was trained on its hidden states. Nothing is tried: of those that fit, the
one whose tokens are the cheapest is taken, by the weights that they read. If there is none here, the hub is asked for
those of `published.toml`.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path
from typing import Any

from outrider.bundle.manifest import Format
from outrider.errors import OutriderError
from outrider_export.bundles.bundle_cache import BundleCache
from outrider_export.describe.plan import Plan, make_plan
from outrider_export.heads.formats import kind_of_head, read_head
from outrider_export.heads.own import NAME as OWN
from outrider_export.heads.own import find_own
from outrider_export.progress import Progress
from outrider_export.sources.gguf_reader import read_header
from outrider_export.sources.gguf_shards import models_in, shards_of
from outrider_export.sources.source import Located, locate
from outrider_export.text_encoders.checkpoint import kind_of_text_encoder
from outrider_export.tokenizers.vocabulary import Vocabulary

AUTO = "auto"
_MAX_SIZE_RATIO = 0.6  # of the main model's bytes: a draft model that is as large cannot pay
_SECONDS = 5  # that the hub has to answer
_OWN = "--draft auto takes the MTP module that the model's own files have."
_PUBLISHED = Path(__file__).with_name("published.toml")


@dataclass(frozen=True)
class Candidate:
    """A drafter that fits. num_weights: that one of its tokens reads, at most."""

    path: Path
    what: str  # such as "draft model" or "eagle3"
    num_weights: int


@dataclass(frozen=True)
class Published:
    """A drafter on the hub. kind: "model", or one of `heads.formats`; "mtp" for one in the main model's own files."""

    kind: str
    id: str


def find_draft(
    main: str | Path,
    cache: BundleCache,
    progress: Progress,
    format: Format = "openvino",  # noqa: A002
) -> str | Path | None:
    """The drafter to take for a model, or None if none is found. A note says which and why.

    main: as of `export_bundle`. cache: its sources are looked at, too.

    Raises as `locate` and `make_plan`.
    """
    located = locate(main)
    if located.kind == "hub" and (folder := _hub_folders().get(located.id)) is not None:
        located = Located(located.id, "hub", folder, folder.name)
    if located.path is not None and kind_of_text_encoder(located) is not None:
        return None  # it writes nothing
    if located.path is not None:
        plan = make_plan("main", located, format, None)
        if find_own(plan, progress) is not None:
            progress.note(_OWN)
            return None
        found = sorted(_fitting(plan, cache, format), key=lambda each: (each.num_weights, str(each.path)))
        if found:
            best, *others = found
            also = f" Also found: {', '.join(each.path.name for each in others[:3])}." if others else ""
            progress.note(
                f"--draft auto chooses {best.path}: {best.what}, which reads {_millions(best.num_weights)} per token, "
                f"{_millions(plan.num_weights)} for the main model: the fastest one that fits.{also}"
            )
            return best.path
    known = published_for(located.id)
    if any(each.kind == OWN for each in known):
        if located.path is None:
            progress.note(_OWN)
            return None
        known = [each for each in known if each.kind != OWN]  # these files are without it
    listed = ", ".join(f"{each.id} ({each.kind})" for each in known)
    for each in known:
        if _is_reachable(each.id):
            progress.note(f"--draft auto chooses {each.id} ({each.kind}) from the hub, published for this model.")
            return each.id
    where = "beside the model, in the cache or in the hub's local cache"
    if known:
        progress.note(
            f"--draft auto has found no drafter {where}, and the hub cannot be reached. Published for this model, not "
            f"tested here: {listed}. Download one and name it with --draft. Until then, drafts are copied from "
            "prompt and answer."
        )
    else:
        progress.note(
            f"--draft auto has found no drafter {where}, and knows no published one. Drafts are copied from prompt "
            "and answer."
        )
    return None


@cached
def _table() -> list[tuple[re.Pattern[str], list[Published]]]:
    entries: list[dict[str, Any]] = tomllib.loads(_PUBLISHED.read_text(encoding="utf-8"))["main"]
    return [
        (re.compile(entry["pattern"], re.IGNORECASE), [Published(**each) for each in entry["drafters"]])
        for entry in entries
    ]


def published_for(name: str) -> list[Published]:
    """The drafters that are published for a model, by its hub id, or the name of its folder or file."""
    return next((drafters for pattern, drafters in _table() if pattern.search(name.replace("_", "-"))), [])


def _fitting(plan: Plan, cache: BundleCache, format: Format) -> Iterator[Candidate]:  # noqa: A002
    """The local drafters that fit a main model."""
    main, size = plan.path.resolve(), _size(plan.path)
    seen = {main}
    for path in _local(plan.path, cache):
        if (resolved := path.resolve()) in seen or not 0 < _size(path) <= _MAX_SIZE_RATIO * size:
            continue
        seen.add(resolved)
        with contextlib.suppress(OutriderError):  # damaged, or of a kind that is not known
            if (kind := kind_of_head(path)) is not None:
                read_head(path, plan.geometry)
                yield Candidate(path, kind, _size(path) // (2 if path.is_dir() else 1))
            elif _vocabulary(path) == plan.vocabulary.tokens:
                yield Candidate(path, "a draft model", make_plan("draft", locate(path), format, None).num_weights)


def _vocabulary(path: Path) -> tuple[str | None, ...]:
    return (Vocabulary.of_folder(path) if path.is_dir() else Vocabulary.of_gguf(read_header(path))).tokens


def _local(main: Path, cache: BundleCache) -> Iterator[Path]:
    """Models that may be drafters, from the nearest on."""
    beside = main.resolve().parent
    with contextlib.suppress(OSError):
        yield from sorted(
            [*(path for path in beside.iterdir() if (path / "config.json").is_file()), *models_in(beside)]
        )
    for entry in cache.entries():
        yield from (
            Path(source.name) for source in entry.sources if source.kind != "hub" and Path(source.name).exists()
        )
    yield from _hub_folders().values()


def _size(path: Path) -> int:
    """Bytes of a model's weights."""
    files = path.glob("*.safetensors") if path.is_dir() else shards_of(path)
    return sum(file.stat().st_size for file in files)


def _hub_folders() -> dict[str, Path]:
    """The checkpoints in the hub's local cache, by their ids."""
    try:
        import huggingface_hub

        found = huggingface_hub.scan_cache_dir().repos
    except Exception:  # not installed, or there is no such cache
        return {}
    newest = {
        repo.repo_id: max(repo.revisions, key=lambda each: each.last_modified) for repo in found if repo.revisions
    }
    folders = {name: Path(each.snapshot_path) for name, each in newest.items()}
    return {name: folder for name, folder in folders.items() if (folder / "config.json").is_file()}


def _is_reachable(name: str) -> bool:
    """Whether the hub has a repository of this name, and lets us in."""
    try:
        import huggingface_hub

        huggingface_hub.HfApi().model_info(name, timeout=_SECONDS)
    except Exception:  # offline, gated or gone: each has errors of its own
        return False
    return True


def _millions(num_weights: int) -> str:
    return f"{num_weights / 1e6:,.0f} million weights"
