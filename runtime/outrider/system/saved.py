"""Measurements and other results that are saved on disk for later starts."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec
import platformdirs

from outrider.errors import one_line
from outrider.system.files import FAULTS, NO_ROOM, check_seal, sealed, why, write_whole

log = logging.getLogger("outrider")


def _folder() -> Path:
    """The cache folder. Where a user has no home folder, as in some containers, one that nothing can be written to."""
    if named := os.environ.get("OUTRIDER_CACHE"):  # for child processes, too
        return Path(named)
    try:
        return platformdirs.user_cache_path("outrider", appauthor=False)
    except RuntimeError:
        log.warning("There is no home folder: nothing is saved for later starts. Set OUTRIDER_CACHE to a folder.")
        return Path(os.devnull, "outrider")


FOLDER = _folder()

_FORMAT = 2  # of the files

T = TypeVar("T")


@functools.cache
def _fields_of(kind: Any) -> str:
    """A hash of a type's fields."""
    return hashlib.sha256(msgspec.json.encode(msgspec.json.schema(kind))).hexdigest()[:8]


@dataclass(frozen=True)
class SavedValue(Generic[T]):
    """A value in a file of its own. key: everything that the value depends on. kind: the value's type.

    A value that was saved when the type had other fields is not read: it would lack what they say. A file that is not
    what was written, or not under its name, is deleted, and the log says so.

    value = SavedValue(FOLDER / "verdicts", {"device": "GPU", "driver": "1.2"}, Verdict)
    value.read() or value.write(find_out())
    """

    folder: Path
    key: Mapping[str, Any]
    kind: type[T]

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{hashlib.sha256(self._key.encode()).hexdigest()[:24]}.json"

    @property
    def _key(self) -> str:
        key = {**self.key, "fields": _fields_of(cast("Hashable", self.kind)), "format": _FORMAT}
        return json.dumps(key, sort_keys=True, default=str)

    def read(self) -> T | None:
        """The saved value; None if there is none, or the file is damaged.

        `kind` validates its numbers when the value is made, and raises ValueError.
        """
        try:
            content = self.path.read_bytes()
        except OSError:
            return None
        try:
            record = msgspec.json.decode(content, type=_Record)
            check_seal(msgspec.json.decode(content), is_sealed=True)
            if record.key != self._key:
                raise ValueError("it is another value's")
            return msgspec.json.decode(record.value, type=self.kind)
        except FAULTS as error:
            log.warning("The file %s is damaged, and is made again: %s.", self.path, one_line(error))
            with contextlib.suppress(OSError):
                self.path.unlink()
            return None

    def write(self, value: T) -> None:
        """Save a value. If the folder is not writable, nothing is saved, and the value is found again next time.

        The log says so once if the disk is full.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            record = {"key": self._key, "value": msgspec.json.decode(msgspec.json.encode(value))}
            write_whole(self.path, msgspec.json.format(sealed(record)))
        except OSError as error:
            if error.errno in NO_ROOM:
                _warn(self.folder.parent, why(error))


def forget(*names: str) -> None:
    """Delete everything that is saved in these folders."""
    for name in names:
        shutil.rmtree(FOLDER / name, ignore_errors=True)


@functools.cache
def _warn(folder: Path, reason: str) -> None:
    """Log once that nothing can be saved in a folder."""
    log.warning("Measurements cannot be saved in %s: %s. They are made again at the next start.", folder, reason)


class _Record(msgspec.Struct):
    key: str
    value: msgspec.Raw
