"""Writes a bundle anew with something added, in place of the old one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

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
            shutil.copytree(old.folder, target.new, copy_function=link_or_copy, dirs_exist_ok=True)
            (target.new / MANIFEST_NAME).unlink()  # what is written anew may be no link
            manifest = msgspec.structs.replace(old.manifest, **change(target))
            progress.phase("hash")
            write_manifest(target.new, msgspec.structs.replace(manifest, files=list_files(target.new)))
            read_bundle(target.new)
            target.commit()
    except OSError as error:
        raise ExportError(f"{old.folder} cannot be written: {error}.") from error
    return read_bundle(old.folder)
