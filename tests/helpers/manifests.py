"""Manifests that are changed behind an export's back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from outrider.bundle import list_files, write_manifest

if TYPE_CHECKING:
    from outrider.bundle import Bundle


def rewrite(bundle: Bundle, **changes: Any) -> None:
    """Write the manifest again, with a changed drafter and the current files."""
    drafter = msgspec.structs.replace(bundle.manifest.drafters[0], **changes)
    files = list_files(bundle.folder)
    write_manifest(bundle.folder, msgspec.structs.replace(bundle.manifest, drafters=(drafter,), files=files))
