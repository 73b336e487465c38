"""Hashes of files and vocabularies."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from outrider.bundle.manifest import MANIFEST_NAME, FileEntry
from outrider.system.together import together


def list_files(
    folder: Path, progress: Callable[[int], None] | None = None, known: Mapping[str, FileEntry] | None = None
) -> tuple[FileEntry, ...]:
    """Size and sha256 of every file below `folder`, the manifest excepted, sorted by path.

    Several files are read at the same time, and `progress` is called in their threads, as `sha256_of` does. known:
    those that need not be read, by their paths.
    """
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST_NAME)
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    found = dict(known or {})
    unknown = [name for name in names if name not in found]
    hashes = together([partial(sha256_of, names[name], progress) for name in unknown])
    for name, sha256 in zip(unknown, hashes, strict=True):
        found[name] = FileEntry(name, names[name].stat().st_size, sha256.result())
    return tuple(found[name] for name in names)


def sha256_of(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """The sha256 of a file, read in pieces; `progress` is called with each piece's length in bytes."""
    return sha256_of_all([path], progress)


def sha256_of_all(paths: Iterable[Path], progress: Callable[[int], None] | None = None) -> str:
    """The sha256 of several files, one after another, as if they were one."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
                if progress:
                    progress(len(piece))
    return digest.hexdigest()


def vocabulary_sha256(tokens: Iterable[str]) -> str:
    """One hash for a vocabulary: the token strings in id order, byte-level pieces in their raw spelling."""
    return hashlib.sha256("\0".join(tokens).encode("utf-8", "surrogatepass")).hexdigest()
