"""Measurements and other results that are saved on disk for later starts."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import platformdirs

from outrider.system.files import FAULTS, write_whole

# The environment variable names another folder, for child processes too.
FOLDER = Path(os.environ.get("OUTRIDER_CACHE") or platformdirs.user_cache_path("outrider", appauthor=False))

T = TypeVar("T")


@dataclass(frozen=True)
class SavedValue(Generic[T]):
    """A value in a file of its own. key: everything that the value depends on. kind: the value's type.

    A value that was saved when the type had other fields is not read: it would lack what they say.

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

    @functools.cached_property
    def _key(self) -> str:
        fields = hashlib.sha256(msgspec.json.encode(msgspec.json.schema(self.kind))).hexdigest()[:8]
        return json.dumps({**self.key, "fields": fields}, sort_keys=True, default=str)

    def read(self) -> T | None:
        """The saved value; None if there is none, or the file is damaged.

        `kind` validates its numbers when the value is made, and raises ValueError.
        """
        try:
            record = msgspec.json.decode(self.path.read_bytes(), type=_Record)
            return msgspec.json.decode(record.value, type=self.kind)
        except FAULTS:
            return None

    def write(self, value: T) -> None:
        """Save a value. If the folder is not writable, nothing is saved, and the value is found again next time."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            record = _Record(self._key, msgspec.Raw(msgspec.json.encode(value)))
            write_whole(self.path, msgspec.json.format(msgspec.json.encode(record)))


def forget(*names: str) -> None:
    """Delete everything that is saved in these folders."""
    for name in names:
        shutil.rmtree(FOLDER / name, ignore_errors=True)


class _Record(msgspec.Struct):
    key: str
    value: msgspec.Raw
