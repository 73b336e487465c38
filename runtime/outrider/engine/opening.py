"""A bundle by what a user names: its folder, or a model, of which one is made and found again.

    bundle = open_bundle("my-pair")
    bundle = open_bundle("model.gguf", draft="small.gguf")     # exported once, into the cache folder

This is the one place outside the command line that reaches the export half, and only when a model is named.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outrider.bundle.folder import Bundle, as_folder, check_no_draft, read_bundle
from outrider.bundle.manifest import MANIFEST_NAME
from outrider.config import DeviceConfig
from outrider.errors import ExportError, needs
from outrider.system.files import shown

if TYPE_CHECKING:
    from outrider_export.progress import Progress


def open_bundle(
    model: str | Path | Bundle,
    draft: str | Path | None = None,
    *,
    for_this_machine: bool = True,
    main_first: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """The bundle in a folder; or that of a .gguf file, a checkpoint folder or a hub id, exported if it was not yet.

    draft: the draft model for a model that is no bundle, of the same kinds; "auto": one that is found, or those of a
    bundle. for_this_machine, progress: of an export; see `outrider_export.export_bundle`. main_first: whether a pair
    that is not converted yet may begin with its main model; see `Bundle.pair`.

    Raises:
        BundleError: when there is nothing of this name, or the bundle is damaged.
        OptionError: when a draft model is named for a bundle.
        ExportError: when the model cannot be exported.
    """
    if isinstance(model, Bundle):
        check_no_draft(model.folder, draft)
        return model
    folder = as_folder(model)
    if folder.is_dir() and ((folder / MANIFEST_NAME).is_file() or not is_model(folder)):
        bundle = read_bundle(folder)
        check_no_draft(folder, draft)
        return bundle
    what = f"{shown(model)} is no bundle, and the export half of outrider, which makes one of a model, is not installed"
    with needs(what, "export", ExportError):
        from outrider_export.bundles.cached import cached_bundle
    return cached_bundle(model, draft, for_this_machine=for_this_machine, main_first=main_first, progress=progress)


def open_draft_bundle(bundle: Bundle, options: DeviceConfig) -> Bundle:
    """The bundle that has a bundle's draft models: another one if the options name it. Raises as `open_bundle`."""
    if options.draft_bundle is None:
        return bundle
    return open_bundle(options.draft_bundle, for_this_machine=options.takes_any_form)


def is_model(folder: Path) -> bool:
    """Whether a folder has a checkpoint, or GGUF files."""
    return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, or of a folder that has nothing else to load."""
    if not path.is_dir():
        return path.is_file() and path.suffix.lower() == ".gguf"
    return is_model(path) and not any((path / name).is_file() for name in (MANIFEST_NAME, "config.json"))
