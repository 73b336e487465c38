"""Manifests that are changed after an export's back."""

from typing import Any

import msgspec

from outrider.bundle import Bundle, list_files, write_manifest


def rewrite(bundle: Bundle, **changes: Any) -> None:
    """Write the manifest again, with a changed drafter and the current files."""
    drafter = msgspec.structs.replace(bundle.manifest.drafters[0], **changes)
    files = list_files(bundle.folder)
    write_manifest(bundle.folder, msgspec.structs.replace(bundle.manifest, drafters=(drafter,), files=files))
