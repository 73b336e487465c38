"""A training's checkpoint, of tensors, numbers and texts in dicts and lists: one file, whole or not there at all."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from outrider.errors import ExportError, one_line


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """What was written last; None if nothing was.

    Raises:
        ExportError: when the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        # weights_only: a pickle that runs no code.
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ExportError(
            f"The checkpoint {path} cannot be read: {one_line(error)}. Delete it to train from the start."
        ) from error
    return state


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the file. A kill leaves the one before.

    Raises:
        ExportError: when the disk is full, or the folder cannot be written.
    """
    new = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except (OSError, RuntimeError) as error:  # torch raises the latter for a full disk
        raise ExportError(f"The checkpoint {path} cannot be written: {one_line(error)}. Make room.") from error
