"""Reads the header of a GGUF file: metadata, and the names, types and shapes of the tensors.

Reads nothing but the header, without the package gguf, and only once while the file does not change. Every length in
the file is checked before it is used. So a cut or damaged file raises an `ExportError`, and does not crash. Of arrays,
which may be as long as the file, only the needed ones are read.

Source: the GGUF specification, ggml/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import functools
import mmap
import struct
import time
from collections.abc import Set
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from outrider.errors import ExportError
from outrider_export.sources.gguf_file import TENSOR_TYPES, GGUFHeader, TensorInfo, UnreadArray
from outrider_export.sources.gguf_shards import check_split, complete_shards

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4  # arrays in arrays; real files have at most two
# The arrays that are read, and the types that their items may have.
_INTEGERS = frozenset(type_id for type_id, code in _SCALARS.items() if code not in "fd?")
_READ = {
    "tokenizer.ggml.tokens": frozenset((_STRING,)),
    "tokenizer.ggml.token_type": _INTEGERS,
    "tokenizer.ggml.merges": frozenset((_STRING,)),
    "tokenizer.ggml.scores": frozenset((6,)),  # float32
}

# Of models whose layers differ, and the layers that drafters read.
_BY_LAYER = {
    ".target_layers": _INTEGERS,
    ".extract_layers": _INTEGERS,
    ".attention.head_count_kv": _INTEGERS,
    ".feed_forward_length": _INTEGERS,
    ".attention.sliding_window_pattern": _INTEGERS | {7},
    ".attention.rope_pattern": _INTEGERS | {7},
    ".activation_sparsity_scale": frozenset({6}),
}

_LAST_STRINGS: dict[int, tuple[bytes, list[str]]] = {}  # by their number: the last array's bytes and texts
_MANY_STRINGS = 10_000
_SETTLED_NS = 3 * 10**9


def read_header(path: Path) -> GGUFHeader:
    """Read the header of the GGUF file at `path`; if it is one part of several, of all of them.

    Raises:
        ExportError: if it is not a GGUF file, is damaged or cut short, or a part is missing or of another model.
    """
    paths = complete_shards(path)
    headers = [_read_if_changed(each) for each in paths]
    for number, header in enumerate(headers):
        said = header.integer("split.count", 1), header.integer("split.no", number)
        check_split(header.path, number, len(paths), *said)
    first, tensors = headers[0], {name: each for header in headers for name, each in header.tensors.items()}
    if not tensors:
        raise ExportError(f"{path} holds no tensors, so it is not a model.")
    promised = first.integer("split.tensors.count", len(tensors))
    if len(tensors) != sum(len(header.tensors) for header in headers) or promised not in (0, len(tensors)):
        raise ExportError(
            f"{path} and its other parts hold {len(tensors):,} tensors, and {promised:,} belong to the model: they are "
            "not of one model. Download all parts again."
        )
    return replace(first, tensors=tensors)


def _read_if_changed(path: Path) -> GGUFHeader:
    """The header of one file; it is read again when the file's size or time has changed."""
    try:
        stat = path.stat()
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error}.") from error
    if time.time_ns() < stat.st_mtime_ns + _SETTLED_NS:  # it may change again within a tick of the disk's clock
        return _read_one(path)
    return _read_known(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


@functools.lru_cache(maxsize=4)
def _read_known(path: Path, *_: int) -> GGUFHeader:
    return _read_one(path)


def _read_one(path: Path) -> GGUFHeader:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
        raise ExportError(f"{path} cannot be read: {error}.") from error


def aligned(position: int, alignment: int) -> int:
    """The next position that is a multiple of `alignment`."""
    return -(-position // alignment) * alignment


class _Reader:
    """Walks the file from the front; every read is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def header(self) -> GGUFHeader:
        if self.data[:4] != b"GGUF":
            raise ExportError(f"{self.path} is not a GGUF file: it starts with {bytes(self.data[:4])!r}.")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise ExportError(f"{self.path} has GGUF version {version}; versions 2 and 3 (little-endian) are read.")
        num_tensors, num_keys = self.count(12), self.count(12)
        metadata: dict[str, Any] = {}
        entries: dict[str, tuple[int, int]] = {}
        for _ in range(num_keys):
            entry = self.at
            key = self.string()
            read = next((types for end, types in _BY_LAYER.items() if key.endswith(end)), _READ.get(key, frozenset()))
            metadata[key] = self.value(self.scalar("I"), read)
            entries[key] = (entry, self.at)
        tensors: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            name = self.string()
            dimensions = self.scalar("I")
            if dimensions > 8:
                raise self.damaged(f"tensor {name!r} has {dimensions} dimensions")
            shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
            type_id, offset = self.scalar("I"), self.scalar("Q")
            if type_id not in TENSOR_TYPES:
                raise ExportError(f"{self.path} stores {name} in tensor type {type_id}, which is not known here.")
            type_name, _, _ = TENSOR_TYPES[type_id]
            if name in tensors:
                raise self.damaged(f"it has two tensors {name!r}")
            tensors[name] = TensorInfo(type_name, shape, self.path, offset)
        header = GGUFHeader(self.path, metadata, {}, entries)
        start = aligned(self.at, header.alignment)
        tensors = {name: replace(each, begin=start + each.begin) for name, each in tensors.items()}
        spans = [(each.begin, each.begin + each.num_bytes) for each in tensors.values()]
        if (end := max((end for _, end in spans), default=0)) > len(self.data):
            raise ExportError(
                f"{self.path} is cut short: it has {len(self.data):,} bytes and its header promises {end:,}. Fetch it "
                "again."
            )
        # Tensors that share bytes could take many times the file's size in memory.
        for (_, end), (begin, _) in pairwise(sorted(span for span in spans if span[0] < span[1])):
            if end > begin:
                raise self.damaged(f"two tensors have the bytes from {begin:,} on")
        return replace(header, tensors=tensors)

    def damaged(self, why: str) -> ExportError:
        return ExportError(f"{self.path} is damaged: {why} (at byte {self.at:,}). Fetch it again.")

    def take(self, size: int) -> int:
        """Advance by `size` bytes, and return the position before."""
        if size > len(self.data) - self.at:
            raise self.damaged("its header continues past the end of the file")
        self.at += size
        return self.at - size

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def count(self, least: int) -> int:
        """A number of items that take at least `least` bytes each."""
        count = int(self.scalar("Q"))
        if count * least > len(self.data) - self.at:
            raise self.damaged(f"it promises {count:,} items where {len(self.data) - self.at:,} bytes are left")
        return count

    def string(self) -> str:
        size = self.count(1)
        start = self.take(size)
        return self.data[start : start + size].decode("utf-8", "surrogateescape")

    def strings(self, count: int) -> list[str]:
        """Texts of an array. Models of one family have the same ones, which are read once."""
        begin, data, unpack = self.at, self.data, struct.Struct("<Q").unpack_from
        if (known := _LAST_STRINGS.get(count)) and data[begin : begin + len(known[0])] == known[0]:
            self.at += len(known[0])
            return known[1]
        made, at = [], begin
        try:
            for _ in range(count):
                end = at + 8 + unpack(data, at)[0]
                made.append(data[at + 8 : end])
                at = end
        except (struct.error, OverflowError):  # a length may have 64 bits
            at = len(data) + 1
        if at > len(data):
            raise self.damaged("its header continues past the end of the file")
        self.at = at
        texts = [each.decode("utf-8", "surrogateescape") for each in made]
        if count > _MANY_STRINGS:
            _LAST_STRINGS[count] = data[begin:at], texts
        return texts

    def value(self, type_id: int, read: Set[int]) -> Any:
        """A value of the metadata; an array is read if the type of its items is in `read`."""
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            return self.scalar(self.code(type_id))
        start, item = self.at, self.scalar("I")
        if item not in read:
            self.at = start
            return UnreadArray(self.skip_array())
        if item == _STRING:
            return self.strings(self.count(8))
        code: Any = self.code(item)
        size = struct.calcsize("<" + code)
        num_bytes = self.count(size) * size
        first = self.take(num_bytes)
        return memoryview(self.data[first : first + num_bytes]).cast(code)

    def code(self, type_id: int) -> str:
        """The `struct` code of a scalar type."""
        if type_id not in _SCALARS:
            raise self.damaged(f"its metadata has a value of type {type_id}")
        return _SCALARS[type_id]

    def skip_array(self, depth: int = 1) -> int:
        """Advance past an array, and return its number of items."""
        if depth > _MAX_DEPTH:
            raise self.damaged("its metadata nests arrays too deeply")
        item = self.scalar("I")
        if item not in (_STRING, _ARRAY):
            size = struct.calcsize("<" + self.code(item))
            count = self.count(size)
            self.take(count * size)
            return count
        count = self.count(8 if item == _STRING else 12)
        for _ in range(count):
            if item == _STRING:
                self.take(self.count(1))
            else:
                self.skip_array(depth + 1)
        return count
