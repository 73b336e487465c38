"""Conversions are slow: each is made once, and found again while nothing that it depends on has changed."""

import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from filelock import FileLock


class Conversions:
    """Folders by recipe, made in this run or in one before.

        made = Conversions(cache, copies, packages=[Path(outrider_export.__file__).parent])
        folder = made.find({"export": sha256_of(checkpoint), "weights": "int8"}, make)    # make(folder) fills it

    A folder is found again by the sha256 of its recipe and of what every recipe depends on: all files of `packages`,
    the versions of all that is installed, Python, and the machine. What was made on other ground is deleted. Callers
    get a copy in `copies`, the same for all, which is to be read only: what a test does to it is gone with the run.
    """

    def __init__(self, cache: Path, copies: Path, packages: Iterable[Path]) -> None:
        self._folder, self._copies = cache / _ground(packages), copies
        for other in cache.iterdir() if cache.exists() else ():
            if other != self._folder:
                shutil.rmtree(other, ignore_errors=True)

    def find(self, recipe: dict[str, Any], make: Callable[[Path], object]) -> Path:
        """A copy of the folder that `make` has filled, whole: one that fails leaves nothing to be found."""
        key = _digest(recipe)
        copy = self._copies / key
        if not copy.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self._folder / f"{key}.lock"):  # another process of the same run may be making it
                if not (self._folder / key).exists():
                    made = Path(tempfile.mkdtemp(prefix="part-", dir=self._folder))
                    make(made)
                    made.rename(self._folder / key)
            shutil.copytree(self._folder / key, copy)
        return copy


def sha256_of(path: Path) -> str:
    """Of a file, or of all files of a folder; of their names, too, and of its own."""
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and file.parent.name != "__pycache__":  # another process may be writing into it
            content = file.read_bytes()
            found.update(f"{file.relative_to(path.parent).as_posix()} {len(content)}\n".encode())
            found.update(content)
    return found.hexdigest()


def _ground(packages: Iterable[Path]) -> str:
    versions = sorted(f"{found.name} {found.version}" for found in distributions())
    return _digest([list(map(sha256_of, packages)), versions, platform.python_version(), platform.platform()])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
