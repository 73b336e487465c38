"""A cache of bundles, by a key of everything that they are made of.

In the folder `bundles`, each has a folder named after it and its key, my-model-1f3870be274f, and beside that a file of
the same name with .json after it: what it was made of. That file's time is the bundle's last use. A bundle is written
to a folder with a leading dot and renamed when it is complete, and before it is deleted, so that nobody sees a part of
one. A lock, one for a key, lets one process make it while others wait; the system frees it when a process ends, however
it does. What a killed process left behind is deleted by the next that makes something.

A large file that another bundle has too is stored once: both names are hard links to it, where the disk has links. No
file of a bundle is ever written again, and a bundle that is deleted takes its own names away only.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.manifest import MANIFEST_NAME
from outrider.errors import BundleError, ExportError, OptionError, nearest
from outrider.system.files import FAULTS, check_seal, sealed, why, write_whole
from outrider_export.sources.content import is_changed
from outrider_export.sources.source import check_packages
from outrider_export.target import NoRoom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from filelock import FileLock

    from outrider_export.progress import Progress

_LARGE = 1 << 20  # bytes from which on a file is worth a link
_UNFINISHED = ".partial"
_DELETED = ".deleted"


class CachedSource(msgspec.Struct, frozen=True):
    """The source of a bundle's model. name: a path or a hub id. content: a hash, or for a hub id the commit."""

    role: str  # "main" or "draft"
    kind: str  # "gguf", "folder" or "hub"
    name: str
    content: str


class _Record(msgspec.Struct):
    sources: tuple[CachedSource, ...]


@dataclass(frozen=True)
class Entry:
    """A cached bundle. last_used: seconds since 1970."""

    folder: Path
    sources: tuple[CachedSource, ...]  # empty if unknown
    last_used: float

    @property
    def name(self) -> str:
        """The name that commands and `outrider.load` accept."""
        return self.folder.name

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


class BundleCache:
    """The bundles that were made in a folder. It need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bundles"
        self.sources = folder / "sources"  # for `outrider_export.sources.content`

    def get(
        self,
        title: str,
        key: Mapping[str, Any],
        sources: tuple[CachedSource, ...],
        make: Callable[[Path], Bundle],
        progress: Progress,
    ) -> Bundle:
        """The bundle of this key; if there is none, or it is damaged, what `make(folder)` makes.

        title: its name's beginning.

        Raises:
            ExportError: when it cannot be made or written.
        """
        if (found := self.made(key, sources)) is not None:
            return found
        digest = _digest(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked(digest, progress):
                if (found := self._open(digest, sources)) is not None:  # made by another process meanwhile
                    return found
                self.tidy(digest)
                new, final = self.folder / f".{digest}{_UNFINISHED}", self.folder / f"{title}-{digest}"
                try:
                    new.mkdir()
                    made = make(new / title)
                    self._share(made)
                    for damaged in self._folders(digest):
                        self._delete(damaged)
                    made.folder.rename(final)
                finally:
                    shutil.rmtree(new, ignore_errors=True)
                self._touch(final, sources)
                return read_bundle(final)
        except NoRoom as error:
            raise NoRoom(error.what, self._elsewhere) from error
        except OSError as error:
            raise NoRoom(f"{self.folder} cannot be written: {why(error)}.", self._elsewhere) from error

    def made(self, key: Mapping[str, Any], sources: tuple[CachedSource, ...]) -> Bundle | None:
        """The bundle of this key, if there is one that is whole. It counts as used now."""
        return self._open(_digest(key), sources)

    def named(self, name: str) -> Bundle | None:
        """The bundle of this name, as `entries` has it.

        Raises:
            BundleError: when it is damaged.
        """
        folder = self.folder / name
        if name != folder.name or name.startswith(".") or not (folder / MANIFEST_NAME).is_file():
            return None
        bundle = read_bundle(folder)
        self._touch(folder, None)
        return bundle

    def recorded(self, name: str) -> CachedSource | None:
        """The source of this name that was exported last."""
        of_name = [source for entry in self.entries() for source in entry.sources if source.name == name]
        return of_name[0] if of_name else None

    def entries(self) -> list[Entry]:
        """All bundles, damaged ones included, most recently used first."""
        found = []
        with contextlib.suppress(OSError):  # there are none yet, or one is deleted meanwhile
            for folder in self.folder.iterdir():
                if folder.is_dir() and not folder.name.startswith("."):
                    record = _record_of(folder)
                    used = (record if record.exists() else folder).stat().st_mtime
                    found.append(Entry(folder, _sources(record), used))
        return sorted(found, key=lambda entry: (-entry.last_used, entry.name))

    def state_of(self, source: CachedSource) -> str:
        """Whether a source's files are still "there", "changed" or "gone". They are not read."""
        if source.kind == "hub":
            return "there"
        path = Path(source.name)
        if not path.exists():
            return "gone"
        return "changed" if is_changed(path, source.content, self.sources) else "there"

    def find(self, name: str) -> Entry:
        """The entry of this name, or the only one with this prefix.

        Raises:
            OptionError: when there is none, or there are several.
        """
        entries = {entry.name: entry for entry in self.entries()}
        begin = [each for each in entries if each.startswith(name)]
        if name not in entries and len(begin) > 1:
            raise OptionError(f"'{name}' begins several names: {', '.join(sorted(begin))}. Write the whole name.")
        if name not in entries and not begin:
            known = nearest(name, entries) if entries else f"There are no bundles in {self.folder}."
            raise OptionError(f"There is no '{name}' in the cache. {known}")
        return entries[name if name in entries else begin[0]]

    def remove(self, entry: Entry) -> None:
        """Delete a bundle. A program that has it loaded keeps it until it ends.

        Raises:
            ExportError: when the system does not let it go, as Windows while a program uses it.
        """
        try:
            self._delete(entry.folder)
        except OSError as error:
            raise ExportError(
                f"{entry.folder} cannot be deleted: {why(error)}. Close the programs that use it, and try again."
            ) from error

    def tidy(self, held: str | None = None) -> None:
        """Delete what killed processes left behind. held: the key whose lock the caller has."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob(".*"):
                digest = path.name.removeprefix(".").split(".")[0]
                if path.suffix == _DELETED or (path.suffix == _UNFINISHED and digest == held):
                    shutil.rmtree(path, ignore_errors=True)
                elif path.suffix == _UNFINISHED:
                    with contextlib.suppress(OSError), self._lock(digest).acquire(timeout=0):  # Timeout is one
                        shutil.rmtree(path, ignore_errors=True)

    @property
    def size(self) -> int:
        """Bytes on disk of all bundles; a file that several have counts once."""
        found = {}
        with contextlib.suppress(OSError):  # one is deleted meanwhile
            for folder in [entry.folder for entry in self.entries()]:
                for path in folder.rglob("*"):
                    stat = path.stat()
                    if path.is_file():
                        found[stat.st_dev, stat.st_ino] = stat.st_size
        return sum(found.values())

    def _share(self, made: Bundle) -> None:
        """Put links in the place of a new bundle's large files that other bundles have, byte for byte."""
        known: dict[tuple[int, str], list[Path]] = {}
        for entry in self.entries():
            with contextlib.suppress(BundleError):
                for file in read_bundle(entry.folder).manifest.files:
                    known.setdefault((file.size, file.sha256), []).append(entry.folder / file.path)
        for file in made.manifest.files:
            own, others = made.folder / file.path, known.get((file.size, file.sha256), [])
            if file.size < _LARGE:
                continue
            for other in others:
                if own.samefile(other):  # it was taken over
                    break
                linked = own.with_name(f"{own.name}.linked")
                with contextlib.suppress(OSError):  # no links here, too many of them, or it is deleted meanwhile
                    if not filecmp.cmp(own, other, shallow=False):  # weights may have been damaged since
                        continue
                    os.link(other, linked)
                    linked.replace(own)
                    break
                linked.unlink(missing_ok=True)

    @property
    def _elsewhere(self) -> str:
        return (
            "Make room there, name another folder with OUTRIDER_CACHE, or write the bundle elsewhere: "
            "outrider export MODEL -o FOLDER."
        )

    def _open(self, digest: str, sources: tuple[CachedSource, ...]) -> Bundle | None:
        """The bundle of a key, if it is whole. It counts as used now."""
        for folder in self._folders(digest):
            try:
                bundle = read_bundle(folder)
            except BundleError:
                continue
            self._touch(folder, sources)
            return bundle
        return None

    def _folders(self, digest: str) -> list[Path]:
        return sorted(folder for folder in self.folder.glob(f"[!.]*-{digest}") if folder.is_dir())

    def _touch(self, folder: Path, sources: tuple[CachedSource, ...] | None) -> None:
        """Record a bundle's use and its sources. Nothing is recorded in a cache that is read-only.

        Nor is a source whose name is not text, as names on Linux may be.
        """
        record = _record_of(folder)
        with contextlib.suppress(OSError, UnicodeEncodeError):
            if sources is None or _sources(record) == sources:
                os.utime(record)
            else:
                write_whole(record, msgspec.json.format(sealed(msgspec.to_builtins(_Record(sources)))))

    def _delete(self, folder: Path) -> None:
        gone = folder.with_name(f".{folder.name}{_DELETED}")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        _record_of(folder).unlink(missing_ok=True)
        shutil.rmtree(gone, ignore_errors=True)

    @contextmanager
    def _locked(self, digest: str, progress: Progress) -> Iterator[None]:
        lock = self._lock(digest)
        try:
            lock.acquire(timeout=0)
        except TimeoutError:
            progress.note("Another process is making this bundle; waiting for it.")
            lock.acquire(poll_interval=0.1)  # it sleeps between its trials, so that Ctrl-C ends it
        try:
            yield
        finally:
            lock.release()

    def _lock(self, digest: str) -> FileLock:
        check_packages()
        from filelock import FileLock  # 50 ms, which finding a bundle need not take

        return FileLock(self.folder / f".{digest}.lock")


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]


def _record_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _sources(record: Path) -> tuple[CachedSource, ...]:
    try:
        content = record.read_bytes()
        check_seal(msgspec.json.decode(content, type=dict[str, Any]))
        return msgspec.json.decode(content, type=_Record).sources
    except FAULTS:
        return ()
