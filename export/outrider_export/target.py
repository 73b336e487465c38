"""The target folder of a bundle, written under a temporary name until it is complete.

    with Target(output, overwrite=False) as target:
        ...                     # write into target.new; scratch files into target.scratch
        target.commit()         # rename it to its final name

If anything fails before `commit`, Ctrl-C included, no files are left, and an old bundle is not changed. `publish` ends
the writing of a new bundle, and `rewrite` is a whole change of one.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from outrider.bundle.fields import NAME
from outrider.bundle.folder import Bundle, read_bundle
from outrider.bundle.hashes import list_files, sha256_of
from outrider.bundle.kinds import RESERVED_NAMES
from outrider.bundle.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    DrafterEntry,
    FileEntry,
    Manifest,
    ModelEntry,
    TokenizerEntry,
    write_manifest,
)
from outrider.errors import ExportError, OptionError
from outrider.system.files import why
from outrider.version import __version__
from outrider_export.progress import Progress


class NoRoom(ExportError):
    """A bundle cannot be written where it should be. what: without the way out, which depends on who asked for it."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{what} {instead}")
        self.what = what


class Target:
    """A context manager for the folder `output`.

    Raises:
        ExportError: on entering, if there is something at `output` that may not be replaced, or its folder cannot be
            written.
    """

    def __init__(self, output: Path, overwrite: bool) -> None:
        self.output = output.expanduser().absolute()
        self.overwrite = overwrite
        self.leftovers = sorted(self.output.parent.glob(f".{self.output.name}.partial-*"))
        self._known: dict[str, FileEntry] = {}  # files of other bundles
        self._hashing: dict[str, Future[str]] = {}
        self._pool = ThreadPoolExecutor(1)
        self._made: list[Path] = []  # parents that did not exist

    def __enter__(self) -> Self:
        self._check()
        try:
            missing = [folder for folder in self.output.parents if not folder.exists()]
            for folder in reversed(missing):
                folder.mkdir()
                self._made.insert(0, folder)
            prefix = f".{self.output.name}.partial-"
            self._partial = Path(tempfile.mkdtemp(prefix=prefix, dir=self.output.parent))
        except OSError as error:
            self._remove_made()
            raise NoRoom(
                f"{self.output.parent} cannot be written: {error.strerror}.", "Choose another folder with -o."
            ) from error
        self.new, self.scratch = self._partial / "bundle", self._partial / "scratch"
        self._old = self._partial / "old"
        self.new.mkdir()
        self.scratch.mkdir()
        return self

    @property
    def unknown(self) -> dict[str, Path]:
        """The files of the new bundle that are no other's."""
        files = {path.relative_to(self.new).as_posix(): path for path in self.new.rglob("*") if path.is_file()}
        return {name: path for name, path in files.items() if name not in self._known}

    def hash(self, part: str) -> None:
        """Hash the files of a part in another thread. They must not change any more, unless they are forgotten."""
        names = [name for name in self.unknown if name.startswith(f"{part}/")]
        self._hashing |= {name: self._pool.submit(sha256_of, self.new / name) for name in names}

    def known(self, advance: Callable[[int], None]) -> dict[str, FileEntry]:
        """The files that need not be hashed any more. advance: called with bytes that were."""
        for name, sha256 in self._hashing.items():
            self._known[name] = FileEntry(name, (self.new / name).stat().st_size, sha256.result())
            advance(self._known[name].size)
        return self._known

    def take_over(self, other: Bundle, part: str) -> None:
        """Link the files of a part of another bundle."""
        shutil.copytree(other.folder / part, self.new / part, copy_function=link_or_copy)
        self._known |= {entry.path: entry for entry in other.files_of(part)}

    def forget(self, part: str) -> None:
        """Have the files of a part hashed again, as some were written anew."""
        for found in (self._known, self._hashing):
            for name in [name for name in found if name.startswith(f"{part}/")]:
                del found[name]

    def commit(self) -> None:
        """Rename the new bundle to its final name, and delete the old one, if any.

        Raises:
            ExportError: if it cannot be renamed. The old bundle is then restored.
        """
        self._check()  # again: the export took minutes
        swap(self.output, self.new, self._old)
        self._made.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        shutil.rmtree(self._partial, ignore_errors=True)
        self._remove_made()

    def _check(self) -> None:
        if not (self.output.exists() or self.output.is_symlink()):
            return
        if not self.overwrite:
            raise ExportError(f"{self.output} exists. Choose another name with -o, or replace it with --overwrite.")
        if not self.output.is_dir() or self.output.is_symlink():
            raise ExportError(f"{self.output} is not a folder, so it is not replaced. Choose another name with -o.")
        if not (self.output / MANIFEST_NAME).is_file() and any(self.output.iterdir()):
            raise ExportError(
                f"{self.output} is not a bundle: it has no {MANIFEST_NAME}. It is not replaced, not even with "
                "--overwrite; choose another name with -o."
            )

    def _remove_made(self) -> None:
        for folder in self._made:
            if not any(folder.iterdir()):
                folder.rmdir()


def swap(path: Path, new: Path, old: Path) -> None:
    """Put a folder in the place of the one at `path`, if there is one, whose name is `old` then.

    Raises:
        ExportError: if one cannot be renamed. What was at `path` is there again.
    """
    try:
        if path.exists():
            path.rename(old)
        new.rename(path)
    except OSError as error:
        raise ExportError(
            f"{path} cannot be replaced: {why(error)}. Close the programs that use it, and try again."
        ) from error
    finally:
        if old.exists() and not path.exists():
            old.rename(path)


def check_space(folder: Path, needed: int) -> None:
    """Check that `folder`'s disk has `needed` free bytes.

    Raises:
        NoRoom: with both in GB.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise NoRoom(
            f"The export needs {needed / 1e9:.2f} GB and {folder} has {free / 1e9:.2f} GB free.",
            "Make room, or choose another disk with -o.",
        )


def rewrite(
    old: Bundle, change: Callable[[Target], Mapping[str, object]], progress: Progress, output: Path | None = None
) -> Bundle:
    """Write a bundle anew, with links to the old one's files where the disk allows it. Nothing changes if that fails.

    change: is given the target, writes into its new folder, and returns the manifest's fields that change.
    output: the new bundle's folder; by default it takes the old one's place.

    Raises:
        ExportError: when the bundle cannot be written, or as `change`.
    """
    folder = old.folder if output is None else output
    try:
        with Target(folder, overwrite=True) as target:
            progress.phase("convert")
            shutil.copytree(old.folder, target.new, copy_function=link_or_copy, dirs_exist_ok=True)
            (target.new / MANIFEST_NAME).unlink()  # what is written anew may be no link
            manifest = msgspec.structs.replace(old.manifest, **change(target))
            progress.phase("hash")
            write_manifest(target.new, msgspec.structs.replace(manifest, files=list_files(target.new)))
            read_bundle(target.new)
            target.commit()
    except OSError as error:
        raise ExportError(f"{folder} cannot be written: {error}.") from error
    return read_bundle(folder)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make a hard link, or a copy if the file system has no links. A symbolic link would be resolved to the source."""
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def publish(
    target: Target, main: ModelEntry, drafters: Iterable[DrafterEntry], tokenizer: TokenizerEntry, progress: Progress
) -> Bundle:
    """Hash the files of a new bundle that are not known, write its manifest, and give it its name.

    Raises:
        BundleError: when its parts do not fit.
        ExportError: when it cannot be renamed.
    """
    progress.phase("hash", sum(path.stat().st_size for path in target.unknown.values()) or None)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        minimum_runtime=__version__,
        created_by=f"outrider {__version__}",
        main=main,
        drafters=tuple(drafters),
        tokenizer=tokenizer,
        files=list_files(target.new, progress.advance, target.known(progress.advance)),
    )
    write_manifest(target.new, manifest)
    read_bundle(target.new)
    target.commit()
    return read_bundle(target.output)


def check_new_name(name: str, what: str, taken: Sequence[str], folder: Path) -> None:
    """Raise OptionError unless `name` can be that of something new in a bundle, which gets this folder there."""
    if name in taken:
        raise OptionError(f"The bundle has {what} {name!r} already ({', '.join(taken)}). Choose another name.")
    if not re.fullmatch(NAME, name) or name in RESERVED_NAMES or folder.exists():
        raise OptionError(
            f"name={name!r} cannot be {what}'s: it has to be letters, digits, '.', '_' and '-', no folder of the "
            f"bundle, and none of {', '.join(RESERVED_NAMES)}. Choose another name."
        )
