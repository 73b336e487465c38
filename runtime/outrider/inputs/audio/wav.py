"""Reads WAV files of PCM and floats, in every form of the header.

Source: Microsoft and IBM 1991, "Multimedia Programming Interface and Data Specifications"; WAVE_FORMAT_EXTENSIBLE;
EBU Tech 3306 (RF64).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")  # of a sub-format, whose first two bytes are a tag
_NAMES = {2: "ADPCM", 6: "A-law", 7: "µ-law", 17: "ADPCM", 49: "GSM", 80: "MPEG", 85: "MP3", 255: "AAC"}
_BLOCK = 1 << 20  # bytes that are converted at once
_MOST_CHUNKS = 1000  # of a header


class OtherCodec(ValueError):
    """The file is a WAV file, with samples that only a codec can read."""


class _Format(NamedTuple):
    tag: int
    num_channels: int
    rate: int  # Hz
    width: int  # bytes of a sample


def is_wav(file: BinaryIO) -> bool:
    """Whether a file begins as WAV files do."""
    begin = file.read(12)
    return begin[:4] in (b"RIFF", b"RF64") and begin[8:] == b"WAVE"


def read(path: Path) -> tuple[NDArray[np.float32], int]:
    """The samples of a file, from −1 to 1 and averaged over its channels, float32 [n], and its rate.

    What the header says of sizes is not believed: data that is cut short is read as far as it goes, and a size of 0 or
    0xFFFFFFFF, as programs write that do not know it yet, means the rest of the file.

    Raises:
        OtherCodec: for compressed audio.
        ValueError: when it is damaged.
        OSError: when it cannot be read.
    """
    with path.open("rb") as file:
        num_bytes = path.stat().st_size
        file.seek(12)
        found: _Format | None = None
        for _ in range(_MOST_CHUNKS):
            if len(header := file.read(8)) < 8:
                break
            name, size = header[:4], int.from_bytes(header[4:], "little")
            begin = file.tell()
            if name == b"data":
                if found is None:
                    raise ValueError("its samples come before their format")
                is_unknown = size in (0, 0xFFFFFFFF)
                return _samples(file, found, num_bytes - begin if is_unknown else min(size, num_bytes - begin))
            if name == b"fmt ":
                found = _format(file.read(min(size, 64)))
            file.seek(begin + size + size % 2)
        raise ValueError("it has no samples: it is damaged, or cut short")


def _format(chunk: bytes) -> _Format:
    """What a chunk "fmt " says, checked."""
    if len(chunk) < 16:
        raise ValueError(f"its format has {len(chunk)} bytes of at least 16")
    tag, num_channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == _EXTENSIBLE:
        if len(chunk) < 40:
            raise ValueError(f"its extended format has {len(chunk)} bytes of 40")
        tag = int.from_bytes(chunk[24:26], "little") if chunk[26:40] == _GUID_TAIL else tag
    widths = {_PCM: (1, 2, 3, 4), _FLOAT: (4, 8)}.get(tag)
    if widths is None:
        raise OtherCodec(f"its samples are in another code ({_NAMES.get(tag, f'format {tag:#06x}')}) than PCM")
    if not num_channels or not rate:
        raise ValueError(f"it has {num_channels} channels and {rate:,} samples a second")
    # Fewer bits than whole bytes are the upper ones of a sample.
    width = block // num_channels if block and block % num_channels == 0 else -(-bits // 8)
    if width not in widths or not 0 < bits <= 8 * width:
        raise ValueError(f"its samples have {bits} bits in {width} bytes, and 8 to 64 in whole bytes are read")
    return _Format(tag, num_channels, rate, width)


def _samples(file: BinaryIO, form: _Format, size: int) -> tuple[NDArray[np.float32], int]:
    """The mean of the channels, from `size` bytes or as many as there are."""
    frame = form.num_channels * form.width
    parts = [np.empty(0, dtype=np.float32)]
    while size >= frame:
        block = file.read(min(max(_BLOCK // frame, 1), size // frame) * frame)
        size -= len(block)
        block = block[: len(block) // frame * frame]
        if not block:
            break
        values = _values(block, form).reshape(-1, form.num_channels)
        parts.append(values.mean(axis=1, dtype=np.float32))
    return np.concatenate(parts), form.rate


def _values(block: bytes, form: _Format) -> NDArray[np.float32]:
    """Samples from −1 to 1, from their bytes."""
    if form.tag == _FLOAT:
        with np.errstate(over="ignore"):  # infinity is refused elsewhere
            return np.frombuffer(block, dtype=f"<f{form.width}").astype(np.float32)
    if form.width == 1:  # unsigned
        return np.frombuffer(block, dtype=np.uint8).astype(np.float32) / np.float32(128) - np.float32(1)
    scale = np.float32(1 << (8 * form.width - 1))
    if form.width == 3:
        parts = np.frombuffer(block, dtype=np.uint8).reshape(-1, 3).astype(np.int32)
        whole = (parts[:, 0] << 8 | parts[:, 1] << 16 | parts[:, 2] << 24) >> 8
        return whole.astype(np.float32) / scale
    return np.frombuffer(block, dtype=f"<i{form.width}").astype(np.float32) / scale
