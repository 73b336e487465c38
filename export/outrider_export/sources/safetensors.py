"""The tensors of safetensors files, read one by one.

Other formats of weights are pickles, which run code when they are loaded.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from outrider.bundle.fields import NonNegative
from outrider.errors import ExportError
from outrider.system.files import FAULTS, shown, why
from outrider_export.sources.source import AGAIN, NO_TEXT, configuring, read_json

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{,199}")  # in the checkpoint's own folder
# What trainers put into names: torch.compile, FSDP and activation checkpoints anywhere; DDP and PEFT before all.
_WRAPPERS = re.compile(r"^(?:module\.)+|^base_model\.model\.|_(?:orig_mod|(?:fsdp|checkpoint)_wrapped_module)\.")
_UNMERGED = (".base_layer.", ".lora_A.", ".modules_to_save.")  # of a model that was saved with PEFT around it
_MOST_DIMENSIONS = 16
_MOST_HEADER_BYTES = 100_000_000  # by the format
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def count_weights(folder: Path) -> int:
    """The number of weights in a checkpoint's safetensors files, from their headers. Raises as `tensors_of`.

    Those of a model that is run without images are not counted for them.
    """
    tensors = {name: each for name, each in tensors_of(folder).items() if not name.startswith(NO_TEXT)}
    # A byte of MXFP4 has two of them.
    return sum(prod(each.shape) * (2 if name.endswith("_blocks") else 1) for name, each in tensors.items())


@dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file, `size` bytes from `begin` on. kind: as the file names it, such as "F32"."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    begin: int
    size: int

    def read(self) -> bytes:
        """Its bytes."""
        with self.path.open("rb") as file:
            file.seek(self.begin)
            return file.read(self.size)

    def numbers(self) -> NDArray[Any]:
        """Its numbers; those with a fraction as float32.

        Raises:
            ExportError: for a type that is not known.
        """
        return self.unpacked(np.frombuffer(self.read(), np.uint8)).reshape(self.shape)

    def unpacked(self, stored: NDArray[np.uint8]) -> NDArray[Any]:
        """Some of its numbers, as `numbers`: uint8 [..., bytes] become [..., numbers]."""
        if self.kind not in _TYPES:
            raise ExportError(f"{self.path} stores numbers as {shown(self.kind)}; known are {', '.join(_TYPES)}.")
        found = stored.view(_TYPES[self.kind])
        if self.kind == "BF16":  # the upper half of a float32
            return (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
        with np.errstate(over="ignore"):  # an infinity is refused where it matters
            return found.astype(np.float32) if self.kind.startswith("F") else found


_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1", "BOOL": "?",
}  # fmt: skip


class _Entry(msgspec.Struct):
    """A tensor in the header of a safetensors file. data_offsets: begin and end, in bytes after the header."""

    dtype: str
    shape: Annotated[tuple[NonNegative, ...], msgspec.Meta(max_length=_MOST_DIMENSIONS)]
    data_offsets: tuple[NonNegative, NonNegative]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The tensors in a checkpoint's safetensors files, by name, without what trainers put into names.

    Raises:
        ExportError: if there are none, one that the index names is missing, one is damaged, or an adapter is beside
            them.
    """
    names = _indexed(folder / "model.safetensors.index.json") or sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
        if pickles:
            raise ExportError(
                f"{folder} has its weights as pickles only ({pickles[0]}), which run code when they are loaded. Look "
                "for the same model with safetensors, or save it again with save_pretrained where you trust it."
            )
        raise ExportError(f"{folder} has no *.safetensors. Download the checkpoint again, with its weights.")
    found = {name: tensor for file in names for name, tensor in tensors_in(folder / file).items()}
    if unmerged := next((name for name in found if any(part in name for part in _UNMERGED)), None):
        raise ExportError(
            f"{folder} has {shown(unmerged)}: a model with an adapter of PEFT around it. Merge it and save it again: "
            "model.merge_and_unload().save_pretrained(FOLDER)."
        )
    return {_WRAPPERS.sub("", name): tensor for name, tensor in found.items()}


def _indexed(path: Path) -> list[str]:
    """The names of the files that an index names; none if there is no index."""
    with configuring(path):
        names = sorted(set(msgspec.convert(read_json(path).get("weight_map", {}), dict[str, str]).values()))
    if outside := [name for name in names if not _FILE_NAME.fullmatch(name)]:
        raise ExportError(f"{path} names {shown(repr(outside[0]))}, which is no file beside it. {AGAIN}")
    return names


def tensors_in(path: Path) -> dict[str, Tensor]:
    """The tensors in a safetensors file, by name.

    Raises:
        ExportError: if it is missing or damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = 8 + struct.unpack("<Q", file.read(8))[0]
            if start > size:
                raise ValueError("its header continues past its end")
            if start - 8 > _MOST_HEADER_BYTES:
                raise ValueError(f"its header has {start - 8:,} bytes, and has to have {_MOST_HEADER_BYTES:,} at most")
            header = msgspec.json.decode(file.read(start - 8), type=dict[str, Any])
        header.pop("__metadata__", None)
        found = {}
        for name, entry in msgspec.convert(header, dict[str, _Entry]).items():
            begin, end = entry.data_offsets
            if not begin <= end <= size - start:
                raise ValueError(f"it has {size:,} bytes of {start + max(begin, end):,}")
            known, count = _TYPES.get(entry.dtype), prod(entry.shape)
            if 8 * (end - begin) < count if known is None else np.dtype(known).itemsize * count != end - begin:
                raise ValueError(f"{shown(name)} has {end - begin:,} bytes for {entry.dtype} {list(entry.shape)}")
            found[name] = Tensor(path, entry.dtype, entry.shape, start + begin, end - begin)
        # Tensors that share bytes could take many times the file's size in memory.
        for one, other in pairwise(sorted((t for t in found.values() if t.size), key=lambda t: t.begin)):
            if one.begin + one.size > other.begin:
                raise ValueError(f"two tensors have the bytes from {other.begin:,} on")
    except (*FAULTS, struct.error) as error:
        raise ExportError(f"{path} is missing or damaged: {why(error)}. {AGAIN}") from error
    return found


def read_tensors(folder: Path, files: str = "*.safetensors") -> dict[str, NDArray[Any]]:
    """All tensors of a checkpoint folder's files of this name; those in half precision as float32.

    Raises:
        ExportError: when there are none, or a file is damaged.
    """
    paths = sorted(folder.glob(files))
    if not paths:
        raise ExportError(f"{folder} has no {files}. Convert its weights to that format.")
    return {name: tensor.numbers() for path in paths for name, tensor in tensors_in(path).items()}
