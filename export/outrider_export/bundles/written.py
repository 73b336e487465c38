"""The files of a bundle that is being written: hashed while others are converted, or taken over from another bundle."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from outrider.bundle.hashes import sha256_of
from outrider.bundle.manifest import FileEntry
from outrider_export.target import link_or_copy

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from outrider.bundle.folder import Bundle


class Written:
    """What is known of the files in the new bundle's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(1)
        self._known: dict[str, FileEntry] = {}
        self._waiting: dict[str, Future[str]] = {}

    def hash(self, part: str) -> None:
        """Hash the files of a part in another thread. They must not change any more."""
        for path in sorted(each for each in (self._folder / part).rglob("*") if each.is_file()):
            name = path.relative_to(self._folder).as_posix()
            self._waiting[name] = self._pool.submit(sha256_of, path)

    def take_over(self, other: Bundle, part: str) -> None:
        """Link the files of a part of another bundle, whose hashes are known."""
        shutil.copytree(other.folder / part, self._folder / part, copy_function=link_or_copy)
        self._known |= {entry.path: entry for entry in other.files_of(part)}

    def forget(self, part: str) -> None:
        """Have the files of a part hashed again, as some were written anew."""
        for found in (self._known, self._waiting):
            for name in [name for name in found if name.startswith(f"{part}/")]:
                del found[name]

    @property
    def num_bytes(self) -> int:
        """Of all files that were not taken over."""
        files = {path.relative_to(self._folder).as_posix(): path for path in self._folder.rglob("*") if path.is_file()}
        return sum(path.stat().st_size for name, path in files.items() if name not in self._known)

    def files(self, advance: Callable[[int], None]) -> dict[str, FileEntry]:
        """The files that were hashed or taken over, by their paths. advance: is called with bytes that are hashed."""
        for name, sha256 in self._waiting.items():
            found = FileEntry(name, (self._folder / name).stat().st_size, sha256.result())
            self._known[name] = found
            advance(found.size)
        self._pool.shutdown()
        return self._known
