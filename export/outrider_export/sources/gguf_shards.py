"""The names of the files that one GGUF model is divided into: `model-00001-of-00003.gguf` and so on.

    shards_of(Path("model-00002-of-00003.gguf"))   # all three, whichever was named
    shards_of(Path("model.gguf"))                  # itself

Source: llama.cpp, `llama_split_path`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from outrider.errors import ExportError

SUFFIX = ".gguf"
_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
_PROJECTOR = "mmproj"  # a file of this name turns images into embeddings, and is no language model
_MAX_SHARDS = 9999  # a name may say 99,999, and each is looked for


def shards_of(path: Path) -> list[Path]:
    """The files of the model that `path` is a part of, in order, whether they exist or not."""
    found = _NAME.fullmatch(path.name)
    count = int(found["count"]) if found else 1
    if found is None or not 1 <= int(found["number"]) <= count <= _MAX_SHARDS:
        return [path]
    return [path.with_name(f"{found['stem']}-{i:05d}-of-{count:05d}{found['suffix']}") for i in range(1, count + 1)]


def complete_shards(path: Path) -> list[Path]:
    """The same.

    Raises:
        ExportError: when one is missing.
    """
    paths = shards_of(path)
    if missing := [each.name for each in paths if not each.is_file()] if len(paths) > 1 else []:
        others = f" and {len(missing) - 1} more are" if missing[1:] else " is"
        raise ExportError(
            f"{path} is one of {len(paths)} parts, and {missing[0]}{others} missing. Download it into the same folder."
        )
    return paths


def whole_name(name: str) -> str:
    """A file's name without the number of a part: "model.gguf" for "model-00002-of-00003.gguf"."""
    found = _NAME.fullmatch(name)
    return f"{found['stem']}{found['suffix']}" if found else name


def models_in(folder: Path) -> list[Path]:
    """The models among the GGUF files in a folder, each by its first file."""
    return first_files(path for path in folder.iterdir() if path.is_file())


def first_files(paths: Iterable[Path]) -> list[Path]:
    """The models among files, each by its first file."""
    models = (path for path in paths if path.suffix.lower() == SUFFIX and _PROJECTOR not in path.name.lower())
    return sorted({shards_of(path)[0] for path in models})


def check_split(path: Path, number: int, count: int, said_count: int, said_number: int) -> None:
    """Check that a file is the part that its name says: `number`, from 0 on, of `count`.

    Raises:
        ExportError: when its metadata says another one.
    """
    said_count = max(said_count, 1)  # files that were never divided may say 0
    if said_count != count and count == 1:
        raise ExportError(
            f"{path} is one of {said_count} parts, and its name does not say which. Give all parts their names again: "
            f"NAME-00001-of-{said_count:05d}.gguf and so on."
        )
    if said_count != count or (count > 1 and said_number != number):
        raise ExportError(
            f"{path} says that it is part {said_number + 1} of {said_count}, and its name says part {number + 1} of "
            f"{count}. Download all parts of one model again."
        )
