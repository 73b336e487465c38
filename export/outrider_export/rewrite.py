"""Writes a bundle anew with something added, in place of the old one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.hashes import list_files
from outrider.bundle.manifest import MANIFEST_NAME, write_manifest
from outrider.errors import ExportError
from outrider_export.keep import link_or_copy
from outrider_export.progress import Progress
from outrider_export.target import Target


def rewrite(old: Bundle, change: Callable[[Target], Mapping[str, object]], progress: Progress) -> Bundle:
    """Write a bundle anew, with links to the old one's files where the disk allows it. Nothing changes if that fails.

    change: is given the target, writes into its new folder, and returns the manifest's fields that change.

    Raises:
        ExportError: when the bundle cannot be written, or as `change`.
    """
    try:
        with Target(old.folder, overwrite=True) as target:
            progress.phase("convert")
            for path in old.folder.rglob("*"):
                if path != old.folder / MANIFEST_NAME:  # what is written anew may be no link
                    _link(path, target.new / path.relative_to(old.folder))
            manifest = msgspec.structs.replace(old.manifest, **change(target))
            progress.phase("hash")
            write_manifest(target.new, msgspec.structs.replace(manifest, files=list_files(target.new)))
            read_bundle(target.new)
            target.commit()
    except OSError as error:
        raise ExportError(f"{old.folder} cannot be written: {error}.") from error
    return read_bundle(old.folder)


def _link(old: Path, new: Path) -> None:
    """Link a file, or copy it where links are impossible. Make a folder."""
    if old.is_dir():
        new.mkdir(parents=True, exist_ok=True)
        return
    new.parent.mkdir(parents=True, exist_ok=True)
    link_or_copy(old, new)
