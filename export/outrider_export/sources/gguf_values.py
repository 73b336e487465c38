"""Unpacks the weights of GGUF files: the usual types here, bit for bit as the package gguf does all others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider_export.sources.gguf_file import GGUFHeader, TensorInfo

_FEW_COLUMNS = 256

Bytes = NDArray[np.uint8]
Values = NDArray[np.float32]
Codes = NDArray[Any]  # uint8 or int8
Place = tuple["slice | int", ...]


@dataclass(frozen=True)
class StoredBlocks:
    """Blocks of 32 or 16 consecutive weights, each scale · code + shift. n: of the file's blocks, which have several.

    Source: ggml/src/ggml-quants.c, `dequantize_row_*`.
    """

    codes: list[tuple[Codes, Place]]  # each with its place in [n, …, size]
    places: tuple[int, ...]  # the shape of these places, after n
    scales: Values  # [n, blocks]
    shifts: Values | None = None  # [n, blocks]; None: there are none
    num_rows: int = 0  # of the matrix

    def __len__(self) -> int:
        return self.num_rows

    def in_order(self, dtype: type[np.generic]) -> NDArray[Any]:
        """The codes [n, *places]."""
        made = np.empty((len(self.scales), *self.places), dtype)
        for codes, place in self.codes:
            made[:, *place] = codes
        return made

    def values(self) -> Values:
        """float32 [n, weights]."""
        made = self.in_order(np.float32)
        blocks = made.reshape(*self.scales.shape, -1)
        blocks *= self.scales[..., None]
        if self.shifts is not None:
            blocks += self.shifts[..., None]
        return made.reshape(len(made), -1)


def _halves(nibbles: Bytes) -> list[tuple[Codes, Place]]:
    """Bytes [n, …, size] as the codes of their lower halves, and after these of their upper ones."""
    places = [slice(None)] * (nibbles.ndim - 2)
    return [(nibbles & 15, (*places, 0)), (nibbles >> 4, (*places, 1))]


def _numbers(blocks: Bytes, begin: int) -> Values:
    """The float16 at a place of each block, as float32 [n, 1]."""
    return blocks[:, begin : begin + 2].copy().view(np.float16).astype(np.float32)


def _q8_0(blocks: Bytes) -> StoredBlocks:
    return StoredBlocks([(blocks[:, 2:].view(np.int8), (0,))], (1, 32), _numbers(blocks, 0))


def _q4_0(blocks: Bytes) -> StoredBlocks:
    codes = [((half - np.uint8(8)).view(np.int8), place) for half, place in _halves(blocks[:, 2:])]
    return StoredBlocks([*codes], (2, 16), _numbers(blocks, 0))


def _q4_1(blocks: Bytes) -> StoredBlocks:
    return StoredBlocks([*_halves(blocks[:, 4:])], (2, 16), _numbers(blocks, 0), _numbers(blocks, 2))


def _fifth_bits(blocks: Bytes, begin: int) -> list[tuple[Codes, Place]]:
    """The codes of blocks with four bytes of fifth bits before those of the lower four."""
    bits = np.unpackbits(blocks[:, begin : begin + 4], axis=1, bitorder="little").reshape(-1, 2, 16)
    bits <<= 4
    return [(half | bits[:, i], place) for i, (half, place) in enumerate(_halves(blocks[:, begin + 4 :]))]


def _q5_0(blocks: Bytes) -> StoredBlocks:
    codes = [((half - np.uint8(16)).view(np.int8), place) for half, place in _fifth_bits(blocks, 2)]
    return StoredBlocks([*codes], (2, 16), _numbers(blocks, 0))


def _q5_1(blocks: Bytes) -> StoredBlocks:
    return StoredBlocks([*_fifth_bits(blocks, 4)], (2, 16), _numbers(blocks, 0), _numbers(blocks, 2))


def _of_k(blocks: Bytes) -> tuple[Values, Values]:
    """The scales and shifts of Q4_K and Q5_K, [n, 8]: products of a number with 6 bits each."""
    low, high, both = blocks[:, 4:16].reshape(-1, 3, 4).swapaxes(0, 1)
    scales = np.concatenate([low & 63, (both & 15) | ((low >> 2) & 48)], -1)
    minima = np.concatenate([high & 63, (both >> 4) | ((high >> 2) & 48)], -1)
    return _numbers(blocks, 0) * scales, -(_numbers(blocks, 2) * minima)


def _q4_k(blocks: Bytes) -> StoredBlocks:
    return StoredBlocks([*_halves(blocks[:, 16:].reshape(-1, 4, 32))], (4, 2, 32), *_of_k(blocks))


def _q5_k(blocks: Bytes) -> StoredBlocks:
    high, nibbles = blocks[:, 16:48], blocks[:, 48:].reshape(-1, 4, 32)
    codes = []
    for i in range(4):
        for j, half in enumerate((nibbles[:, i] & 15, nibbles[:, i] >> 4)):
            codes.append((half | ((high >> (2 * i + j)) & 1) << 4, (i, j)))
    return StoredBlocks([*codes], (4, 2, 32), *_of_k(blocks))


def _q6_k(blocks: Bytes) -> StoredBlocks:
    nibbles, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 32)
    codes = []
    for i in range(4):
        half: Codes = nibbles[:, :, i % 2]
        half = half >> 4 if i > 1 else half & 15
        half = half | ((high >> 2 * i) & 3) << 4
        codes.append(((half - np.uint8(32)).view(np.int8), (slice(None), i)))
    return StoredBlocks([*codes], (2, 4, 32), _numbers(blocks, 208) * blocks[:, 192:208].view(np.int8))


_OWN: dict[str, Callable[[Bytes], StoredBlocks]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip


def check_type(tensor: TensorInfo, name: str) -> None:
    """Raise ExportError for a tensor, of this name, that cannot be unpacked."""
    if tensor.type in (*_OWN, "F32", "F16"):
        return
    from gguf.quants import GGMLQuantizationType, _type_traits  # those that `gguf.dequantize` knows, by their number

    if GGMLQuantizationType[tensor.type] not in _type_traits:
        raise ExportError(f"{tensor.path} stores {name} as {tensor.type}, which the package gguf does not unpack.")


def blocks_of(tensor: TensorInfo, rows: Bytes) -> StoredBlocks:
    """The blocks of a tensor's rows as they are stored, uint8 [n, bytes], of one of the usual types."""
    found = _OWN[tensor.type](np.ascontiguousarray(rows).reshape(-1, tensor.block_bytes))
    return replace(found, num_rows=len(rows))


def unpack(tensor: TensorInfo, rows: Bytes) -> Values:
    """The weights float32 [n, columns] of a tensor's rows as they are stored, uint8 [n, bytes]."""
    if tensor.type in _OWN:
        return blocks_of(tensor, rows).values().reshape(len(rows), -1)
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType[tensor.type]
    found: Values = dequantize(np.ascontiguousarray(rows), kind).astype(np.float32, copy=False)
    return found


def of_groups(reduce: np.ufunc, groups: NDArray[Any]) -> NDArray[Any]:
    """The least or largest number of each group [..., columns], for few columns in pairs: NumPy's loop takes long."""
    *shape, columns = groups.shape
    if columns <= _FEW_COLUMNS:
        flat = groups.reshape(-1)
        while columns % 2 == 0:
            flat, columns = reduce(flat[::2], flat[1::2]), columns // 2
        groups = flat.reshape(*shape, columns)
    found: NDArray[Any] = reduce.reduce(groups, -1)
    return found


def values_of(header: GGUFHeader, name: str) -> Values:
    """All weights of a tensor, in its shape.

    Raises:
        ExportError: when its type cannot be read.
    """
    tensor = header.tensors[name]
    check_type(tensor, name)
    num_rows = math.prod(tensor.shape[:-1])
    rows = tensor.stored().reshape(num_rows, tensor.num_bytes // max(num_rows, 1))
    return unpack(tensor, rows).reshape(tensor.shape)
