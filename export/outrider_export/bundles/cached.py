"""Bundles of models that commands name directly, exported once and cached: `outrider chat model.gguf`.

The key is the content of the models' files, the export's options and our version. So a moved file finds its old
bundle, and a changed file gets a new one. A hub id means the commit that it was exported from, while that bundle is
cached. A path whose file was deleted means the bundle that was exported from it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from outrider.bundle.folder import Bundle, check_no_draft
from outrider.config.files import user_path
from outrider.errors import BundleError, ExportError, OptionError
from outrider.system import saved
from outrider.system.files import shown, usable
from outrider.system.progress import report
from outrider.version import __version__
from outrider_export.bundles.bundle_cache import BundleCache, CachedSource
from outrider_export.bundles.find_draft import AUTO, find_draft
from outrider_export.describe.plan import DEFAULT_WEIGHTS, SMALL_DRAFT
from outrider_export.progress import ForModel, Progress, Silent
from outrider_export.sources.content import absolute, check_unchanged, content_of, stamps_of
from outrider_export.sources.source import NONE, Located, default_name, fetch, locate, nearly_gguf
from outrider_export.weights_choice.choice import machine_key


def cached_bundle(
    main: str | Path,
    draft: str | Path | None = None,
    *,
    for_this_machine: bool = True,
    progress: Progress | None = None,
) -> Bundle:
    """The bundle of a model, and of a draft model for it, in the forms that an export gives them unless told.

    draft: "auto" looks for one; see `find_draft`. "none": without the MTP module that the model's own files may have.
    `main` may also be the name of a bundle in the cache.

    Raises as `export_bundle`, and BundleError when there is nothing of this name.
    """
    cache, progress = BundleCache(saved.FOLDER), progress or _Reported()
    if (named := cache.named(str(main))) is not None:
        check_no_draft(named.folder, draft)
        return named
    if draft == AUTO:
        draft = find_draft(main, cache, progress)
    names = {"main": main} if draft in (None, NONE) else {"main": main, "draft": draft}
    sources = tuple(_source(role, name, cache, ForModel(progress, role)) for role, name in names.items())
    has_draft = len(sources) > 1
    key = {
        "version": __version__,
        "main": [_identity(sources[0]), DEFAULT_WEIGHTS["main"]],
        "draft": [_identity(sources[1]), DEFAULT_WEIGHTS["draft"], SMALL_DRAFT] if has_draft else draft,
        "for": machine_key() if for_this_machine else None,
    }

    def make(output: Path) -> Bundle:
        from outrider_export.bundles.export import export_bundle

        commits = [source.content if source.kind == "hub" else None for source in sources]
        paths = [absolute(Path(source.name)) for source in sources if source.kind != "hub"]
        if gone := [path for path in paths if not path.exists()]:
            raise ExportError(
                f"There is no {gone[0]} any more, and the bundle made from it is damaged, or of another version. "
                "Restore it, or name another model."
            )
        before = [stamps_of(path) for path in paths]
        whose = " and ".join(source.name for source in sources)
        progress.note(f"Making a bundle of {whose}, once, in {cache.folder}.")
        made = export_bundle(
            main,
            draft,
            output=output,
            revision=commits[0],
            draft_revision=commits[-1] if has_draft else None,
            for_this_machine=for_this_machine,
            progress=progress,
        )
        for path, stamps in zip(paths, before, strict=True):
            check_unchanged(path, stamps)
        return made

    return cache.get(default_name(main, draft if has_draft else None), key, sources, make, progress)


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
    """The progress for apps that bring none: a line for each phase, as loading has."""

    def phase(self, name: str, total: int | None = None) -> None:  # noqa: ARG002
        report(f"Exporting: {name}.")

    def note(self, text: str) -> None:
        report(text)
