"""Copies of GGUF files for readers that want one whole file, without its long lists."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from outrider_export.sources.gguf_file import TENSOR_TYPES, is_array
from outrider_export.sources.gguf_reader import aligned, read_header

_UINT32 = 4
_PIECE = 1 << 24  # bytes
_TYPE_IDS = {name: type_id for type_id, (name, _, _) in TENSOR_TYPES.items()}


def write_slim_copy(source: Path, target: Path) -> None:
    """Copy a GGUF file without its tokenizer's lists, whose length goes into `<architecture>.vocab_size`."""
    header = read_header(source)
    size_key, tokens = header.full_key(".vocab_size"), "tokenizer.ggml.tokens"
    vocab_size = len(header.texts(tokens)) if tokens in header.metadata else 0
    added = {size_key: vocab_size} if vocab_size and size_key not in header.entries else {}
    keys = [key for key in header.entries if not (is_array(header.metadata[key]) or key.startswith("split."))]
    with target.open("wb") as new:
        new.write(b"GGUF" + struct.pack("<IQQ", 3, len(header.tensors), len(keys) + len(added)))
        with header.path.open("rb") as old:
            for first, end in (header.entries[key] for key in keys):
                old.seek(first)
                new.write(old.read(end - first))
        for key, value in added.items():
            _write_text(new, key)
            new.write(struct.pack("<II", _UINT32, value))
        position = 0
        for name, tensor in header.tensors.items():
            _write_text(new, name)
            new.write(struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape)))
            new.write(struct.pack("<IQ", _TYPE_IDS[tensor.type], position))
            position = aligned(position + tensor.num_bytes, header.alignment)
        for tensor in header.tensors.values():
            new.write(b"\0" * (aligned(new.tell(), header.alignment) - new.tell()))
            with tensor.path.open("rb") as old:
                old.seek(tensor.begin)
                _copy(old, new, tensor.num_bytes)
        new.write(b"\0" * (aligned(new.tell(), header.alignment) - new.tell()))


def _write_text(new: BinaryIO, text: str) -> None:
    encoded = text.encode("utf-8", "surrogateescape")
    new.write(struct.pack("<Q", len(encoded)) + encoded)


def _copy(old: BinaryIO, new: BinaryIO, num_bytes: int) -> None:
    while num_bytes and (piece := old.read(min(num_bytes, _PIECE))):
        new.write(piece)
        num_bytes -= len(piece)
