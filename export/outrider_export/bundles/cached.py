"""Bundles of models that commands name directly, exported once and cached: `outrider chat model.gguf`.

The key is the content of the models' files, the export's options and our version. So a moved file finds its old
bundle, and a changed file gets a new one. A hub id means the commit that it was exported from, while that bundle is
cached. A path whose file was deleted means the bundle that was exported from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bundle.folder import Bundle, PairToMake, check_no_draft
from outrider.config.files import user_path
from outrider.errors import BundleError, ExportError, OptionError
from outrider.system import saved
from outrider.system.files import shown, usable
from outrider.system.progress import report
from outrider.system.together import start
from outrider.version import __version__
from outrider_export.bundles.bundle_cache import BundleCache, CachedSource
from outrider_export.bundles.find_draft import AUTO, find_draft
from outrider_export.child import begin_beside, work_beside
from outrider_export.describe.plan import DEFAULT_WEIGHTS, SMALL_DRAFT
from outrider_export.progress import ForModel, Progress, Silent
from outrider_export.sources.content import absolute, check_unchanged, content_of, stamps_of
from outrider_export.sources.source import NONE, Located, default_name, fetch, locate, nearly_gguf
from outrider_export.weights_choice.choice import machine_key

if TYPE_CHECKING:
    from outrider_export.bundles.export import ExportRequest

_INTERVAL = 1.0  # seconds between two lines of a phase


def cached_bundle(
    main: str | Path,
    draft: str | Path | None = None,
    *,
    for_this_machine: bool = True,
    main_first: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """The bundle of a model, and of a draft model for it, in the forms that an export gives them unless told.

    draft: "auto" looks for one; see `find_draft`. "none": without the MTP module that the model's own files may have.
    `main` may also be the name of a bundle in the cache. main_first: of a pair that was not made yet, make the main
    model's bundle, so that it can answer while the draft model is converted; see `Bundle.pair`.

    Raises as `export_bundle`, and BundleError when there is nothing of this name.
    """
    wanted = _find(main, draft, for_this_machine, progress or _Reported())
    if isinstance(wanted, Bundle):
        return wanted
    if not main_first or wanted.alone is None or wanted.made() is not None:
        return wanted.get()
    from outrider_export.bundles.export import Export

    with start([Export(wanted.request(), wanted.cache.folder, Silent()).draft_geometry]) as (planned,):
        alone = wanted.alone.get()
    if (geometry := planned.result()) is None:
        return wanted.get()

    make = dataclasses.replace(wanted, progress=_Reported()).get
    names = str(wanted.main), str(wanted.draft), for_this_machine
    return dataclasses.replace(alone, pair=PairToMake(geometry, make, partial(begin_beside, __name__, names)))


def _find(main: str | Path, draft: str | Path | None, for_this_machine: bool, progress: Progress) -> Bundle | _Wanted:
    """A bundle of this name, or what is wanted of the cache."""
    cache = BundleCache(saved.FOLDER)
    if (named := cache.named(str(main))) is not None:
        check_no_draft(named.folder, draft)
        return named
    if draft == AUTO:
        draft = find_draft(main, cache, progress)
    names = {"main": main} if draft in (None, NONE) else {"main": main, "draft": draft}
    sources = tuple(_source(role, name, cache, ForModel(progress, role)) for role, name in names.items())
    return _Wanted(cache, main, draft, sources, for_this_machine, progress)


@dataclass(frozen=True)
class _Wanted:
    """A bundle that is wanted of the cache."""

    cache: BundleCache
    main: str | Path
    draft: str | Path | None
    sources: tuple[CachedSource, ...]
    for_this_machine: bool
    progress: Progress

    @property
    def alone(self) -> _Wanted | None:
        """The main model of a pair; None if there is no draft model."""
        has_draft = len(self.sources) > 1
        return dataclasses.replace(self, draft=NONE, sources=self.sources[:1]) if has_draft else None

    @property
    def key(self) -> dict[str, Any]:
        """Everything that it is made of."""
        main, *draft = map(_identity, self.sources)
        return {
            "version": __version__,
            "main": [main, DEFAULT_WEIGHTS["main"]],
            "draft": [*draft, DEFAULT_WEIGHTS["draft"], SMALL_DRAFT] if draft else self.draft,
            "for": machine_key() if self.for_this_machine else None,
        }

    def made(self) -> Bundle | None:
        """It, if it was made before."""
        return self.cache.made(self.key, self.sources)

    def get(self) -> Bundle:
        """It, made now if it was not. Raises as `export_bundle`."""
        title = default_name(self.main, None if self.alone is None else self.draft)
        return self.cache.get(title, self.key, self.sources, self._make, self.progress)

    def request(self) -> ExportRequest:
        """What is asked of an export."""
        from outrider_export.bundles.export import ExportRequest

        commits = [source.content if source.kind == "hub" else None for source in self.sources]
        return ExportRequest(
            self.main,
            self.draft,
            revision=commits[0],
            draft_revision=None if self.alone is None else commits[-1],
            for_this_machine=self.for_this_machine,
            main_from=None if self.alone is None else self.alone.made(),
            hashes_sources=False,  # the cache knows them
        )

    def _make(self, output: Path) -> Bundle:
        from outrider_export.bundles.export import Export

        paths = [absolute(Path(source.name)) for source in self.sources if source.kind != "hub"]
        if gone := [path for path in paths if not path.exists()]:
            raise ExportError(
                f"There is no {gone[0]} any more, and the bundle made from it is damaged, or of another version. "
                "Restore it, or name another model."
            )
        before = [stamps_of(path) for path in paths]
        whose = " and ".join(source.name for source in self.sources)
        self.progress.note(f"Making a bundle of {whose}, once, in {self.cache.folder}.")
        made = Export(self.request(), output, self.progress).run()
        for path, stamps in zip(paths, before, strict=True):
            check_unchanged(path, stamps)
        return made


def _identity(source: CachedSource) -> str:
    """What the weights come from: of a hub id with a quantization, one of several files of a commit."""
    tag = source.name.partition(":")[2] if source.kind == "hub" else ""
    return f"{source.content}:{tag}" if tag else source.content


def _source(role: str, name: str | Path, cache: BundleCache, progress: Progress) -> CachedSource:
    """The source that a name means, with its content. A hub id that was never exported is downloaded.

    Raises as `_locate`, `fetch` and `content_of`.
    """
    path = absolute(usable(user_path(name)))
    if not path.exists() and (gone := cache.recorded(str(path))) is not None:
        progress.note(f"{shown(name)} is gone; the bundle made from it is used.")
        return CachedSource(role, gone.kind, gone.name, gone.content)
    located = _locate(name, path)
    if located.kind != "hub":
        return CachedSource(
            role, located.kind, str(absolute(located.fetched)), content_of(located, cache.sources, progress)
        )
    if (known := cache.recorded(located.id)) is not None:
        return CachedSource(role, "hub", located.id, known.content)
    return CachedSource(
        role, "hub", located.id, fetch(located, trust_remote_code=False, progress=progress).revision or ""
    )


def _locate(name: str | Path, path: Path) -> Located:
    """As `locate`, for a name that may be meant for a bundle's folder.

    Raises:
        BundleError: when there is nothing of this name. Nothing is asked of the network for one without a slash.
        OptionError, ExportError: as `locate`.
    """
    if path.exists() or nearly_gguf(path):
        return locate(name)
    with contextlib.suppress(OptionError, ExportError):
        located = locate(name)
        if "/" in located.id:
            return located
    raise BundleError(
        f"There is no folder {shown(name)}. Make a bundle with 'outrider export MODEL -o {shown(name)}', or name a "
        "model: a .gguf file, a checkpoint folder or a hub id (org/name)."
    )


class _Reported(Silent):
    """The progress for apps that bring none: a line for each phase, as loading has, and each second how far it is."""

    def __init__(self) -> None:
        self._name, self._total, self._done, self._told = "", 0, 0, 0.0

    def phase(self, name: str, total: int | None = None) -> None:
        self._name, self._total, self._done, self._told = name, total or 0, 0, time.monotonic()
        report(f"Exporting: {name}.")

    def advance(self, count: int) -> None:
        self._done += count
        if self._total and time.monotonic() >= self._told + _INTERVAL:
            self._told = time.monotonic()
            report(f"Exporting: {self._name}, {min(self._done / self._total, 1):.0%}.")

    def note(self, text: str) -> None:
        report(text)


if __name__ == "__main__":
    work_beside(lambda main, draft, for_this_machine: cached_bundle(main, draft, for_this_machine=for_this_machine))
