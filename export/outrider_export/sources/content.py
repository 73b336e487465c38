"""One hash of the content of a model's files, saved so that unchanged files are not read again.

Of a large file it is that of its size, its time of change, its beginning, which has a GGUF file's header, and samples:
reading a file of some GB takes seconds, and longer where it is not in memory.

A file counts as unchanged while its size, its times of change and its inode number are the same. On POSIX no program
can restore all of these; on Windows a program that writes as many bytes and restores the time goes unnoticed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from outrider.bundle.hashes import sha256_of
from outrider.errors import ExportError
from outrider.system.files import shown, why
from outrider.system.saved import SavedValue
from outrider_export.progress import Progress
from outrider_export.sources.gguf_shards import complete_shards
from outrider_export.sources.hub import ALLOWED
from outrider_export.sources.source import OTHER_TEMPLATES, POOLING, Located

# What an export reads of a checkpoint folder, besides: vocabularies that are older than tokenizer.json.
_READ = (*ALLOWED, OTHER_TEMPLATES, POOLING, "*.txt")
# A file that was changed so recently may be changed again within the same tick of the disk's clock: FAT's has 2 s.
_SETTLED_NS = 3 * 10**9


# Files of so many bytes are read whole; of larger ones the beginning, and samples of so many bytes.
_WHOLE, _BEGINNING, _NUM_SAMPLES, _SAMPLE = 1 << 26, 1 << 24, 64, 1 << 16


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """A file's entry in its folder. It changes whenever the file does."""

    name: str
    size: int
    changed: tuple[int, int]  # nanoseconds: of the content; of anything, which programs cannot set (not on Windows)
    number: int  # the disk's own for this file


class _Known(msgspec.Struct):
    stamps: list[Stamp]
    content: str


def content_of(located: Located, folder: Path, progress: Progress) -> str:
    """One hash for the files of a model on disk. folder: where it is saved, for the next time.

    Raises:
        ExportError: when a file cannot be read, or changes meanwhile.
    """
    path = located.fetched
    saved = _saved(path, folder)
    stamps, known = stamps_of(path), saved.read()
    if known is not None and known.stamps == stamps:
        return known.content
    began = time.time_ns()
    progress.phase("hash", sum(min(stamp.size, _WHOLE) for stamp in stamps))
    digest = hashlib.sha256()
    for stamp in stamps:
        try:
            sha256 = _hash(_file(path, stamp), stamp, progress.advance)
        except OSError as error:
            raise ExportError(f"{shown(_file(path, stamp))} cannot be read: {why(error)}.") from error
        # A file's name says what it is for; that of a single one does not.
        digest.update(f"{stamp.name if located.kind == 'folder' else ''} {sha256}\n".encode())
    check_unchanged(path, stamps)
    content = digest.hexdigest()
    if all(max(stamp.changed) + _SETTLED_NS < began for stamp in stamps):
        saved.write(_Known(stamps, content))
    return content


def _hash(file: Path, stamp: Stamp, advance: Callable[[int], None]) -> str:
    if stamp.size <= _WHOLE:
        return sha256_of(file, advance)
    digest = hashlib.sha256(f"{stamp.size} {stamp.changed[0]}\n".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_BEGINNING))
        for number in range(_NUM_SAMPLES):
            stream.seek(_BEGINNING + (stamp.size - _BEGINNING - _SAMPLE) * number // (_NUM_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE))
    advance(_WHOLE)
    return digest.hexdigest()


def is_changed(path: Path, content: str, folder: Path) -> bool:
    """Whether the files at a path look changed since they held this. They are not read."""
    known = _saved(path, folder).read()
    return known is not None and (known.content != content or not _alike(known.stamps, stamps_of(path)))


def stamps_of(path: Path) -> list[Stamp]:
    """The folder entries of a model's files. path: of a file, or one of its parts, or of a checkpoint folder.

    Raises:
        ExportError: when one cannot be found.
    """
    try:
        found = {file for pattern in _READ for file in path.glob(pattern)} if path.is_dir() else complete_shards(path)
        files = sorted(found)
        stamps = []
        for file in files:
            stat = file.stat()
            stamps.append(Stamp(file.name, stat.st_size, (stat.st_mtime_ns, stat.st_ctime_ns), stat.st_ino))
    except OSError as error:
        raise ExportError(f"{shown(path)} cannot be read: {why(error)}.") from error
    return stamps


def check_unchanged(path: Path, stamps: list[Stamp]) -> None:
    """Check that a model's files have not changed since these stamps were taken.

    Raises:
        ExportError: when they are not.
    """
    if not _alike(stamps, stamps_of(path)):
        raise ExportError(f"{shown(path)} has changed while it was read. Try again when it is complete.")


def _alike(*both: list[Stamp]) -> bool:
    """Whether stamps are equal, ignoring ctime: an export may make a hard link, which changes it."""
    before, after = ([(stamp.name, stamp.size, stamp.changed[0], stamp.number) for stamp in each] for each in both)
    return before == after


def absolute(path: Path) -> Path:
    """The absolute path. Symbolic links are not resolved, because their targets may change."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute leaves ".."


def _saved(path: Path, folder: Path) -> SavedValue[_Known]:
    return SavedValue(folder, {"path": str(absolute(path))}, _Known)


def _file(path: Path, stamp: Stamp) -> Path:
    return path / stamp.name if path.is_dir() else path.with_name(stamp.name)
