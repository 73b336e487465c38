"""Rounds the matrices of a decoder to the weights of its IR, some rows at a time, on all processors.

int8 is 8 bits, asymmetric, one scale a row. int4 is 4 bits, asymmetric, groups of 64 (or 32, where a row is no multiple
of 64), with embeddings and output matrix in int8. Both are what nncf's `compress_weights` makes, in the same form of
constants, but that codes are rounded by the scales that are stored, in float16. Zero has a code of its own.

In int4, weights that have codes of 4 bits keep them, in groups of 32, see `own_codes`. Matrices that their file has in
more bits than most are in int8.

Matrices of a layer that multiply the same rows, as those of queries, keys and values, are one matrix if they have the
same form: each product takes some microseconds besides its weights, and those of a small model are read in as many.

The file is the IR's own, so that weights are written once, and memory holds no more than the rows that are being
rounded. See `outrider_export.direct.save`.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider_export.direct import mxfp4
from outrider_export.direct.codes import pack as pack_codes
from outrider_export.direct.codes import paired, rounded
from outrider_export.direct.decoder import OUTPUT_GATE
from outrider_export.direct.own_codes import GROUP, OwnForm, forms_of, is_plain, keep, num_sums
from outrider_export.direct.streams import StreamPart
from outrider_export.direct.weights import (
    EMBEDDING,
    HEAD,
    LAYER_EMBEDDING,
    LAYER_GATE,
    LAYER_INPUTS,
    LAYER_PROJECTION,
    below_each_other,
    layer_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from outrider_export.direct.decoder import Decoder
    from outrider_export.direct.save import Stored
    from outrider_export.direct.weights import StoredMatrix as Matrix
    from outrider_export.direct.weights import Weights

    Numbers = NDArray[Any]
    _Form: TypeAlias = tuple[str, int, int | None]  # a matrix's kind of weights, group and further columns

_CHUNK = 1 << 18  # weights that are rounded at a time, which fit in a processor's own cache
_JOB = 1 << 22  # weights
_GROUPS = (64, 32)  # sizes of groups in int4
_LARGEST = {"int8": 255, "int4": 15}  # codes
_FLOATS: dict[str, type[np.generic]] = {"fp16": np.float16, "fp32": np.float32}
_ALIGNMENT = 64
# Few numbers of a token, in whose exponents errors grow: the decays of gated delta nets, and how much they write.
_FINE = ("linear_attn.in_proj_a", "linear_attn.in_proj_b")


@dataclass(frozen=True)
class FileArray:
    """An array of a new file, whose rows are written by several threads: array[first:last] = rows.

    Through the map, each page of the file would be a fault of its own, and these a third of a conversion's time.
    numbers: mapped, to be read. offset: in the file, in bytes. file, lock: of all arrays of the file.
    """

    numbers: Numbers
    offset: int
    file: BinaryIO
    lock: Lock

    def __setitem__(self, part: slice, rows: Numbers) -> None:
        written = np.ascontiguousarray(rows, self.numbers.dtype).reshape(self.numbers[part].shape)
        with self.lock:
            self.file.seek(self.offset + part.start * self.numbers.strides[0])
            self.file.write(written.data)
            self.file.flush()

    def node(self, stored: list[Stored], shape: list[int], kind: Any = None) -> ov.Node:
        """An input in its place, of this shape, and this type if it is not its own."""
        made = ops.parameter(shape, kind or self.numbers.dtype)
        stored.append((made, self.offset))
        return made


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix of an IR, or those of several experts, one below the other. kind: "int8", "int4", "fp16" or "fp32".

    group: columns that share a scale. sums: further columns, see `own_codes`; None if it has no codes of its own.

    codes: uint8 [rows, columns], for int4 two a byte [rows, columns / 2]; or the weights themselves. zero_points:
    uint8, scales: float16, both [rows, groups]. parts: how many rows it has of each matrix that it consists of, by
    name, one below the other.
    """

    kind: str
    shape: tuple[int, int]
    group: int
    codes: FileArray
    zero_points: FileArray
    scales: FileArray
    sums: int | None
    parts: Mapping[str, int]

    def node(self, stored: list[Stored], experts: int = 0, factor: float = 1.0) -> ov.Node:
        """The matrix float32 [rows, columns] of constants; or [experts, rows, columns], of so many.

        factor: what it is multiplied by, a power of two. What they have in the file is appended to `stored`.
        """
        columns = self.shape[1] + (self.sums or 0)
        rows = [experts, self.shape[0] // experts] if experts else [self.shape[0]]
        if self.kind in _FLOATS:
            codes = self.codes.node(stored, [*rows, columns])
            made = codes if self.kind == "fp32" else ops.convert(codes, "f32")
            return made if factor == 1 else ops.multiply(made, ops.constant(np.float32(factor)))
        groups = [*rows, columns // self.group]
        grouped = [*groups, self.group]
        if self.kind == "int8" and self.group == columns:
            codes, zero_points = self.codes.node(stored, [*rows, columns]), self.zero_points.node(stored, groups)
            scales = self._scales(stored, groups, factor)
        else:
            zero_points = self.zero_points.numbers.reshape([*groups, 1])
            if self.kind == "int4":
                codes, zero_points = self.codes.node(stored, grouped, ov.Type.u4), pack_codes(zero_points)
            else:
                codes, zero_points = self.codes.node(stored, grouped), ops.constant(zero_points)
            scales = self._scales(stored, [*groups, 1], factor)
        centred = ops.subtract(ops.convert(codes, "f16"), ops.convert(zero_points, "f16"))
        scaled = ops.multiply(centred, scales)
        if codes.get_output_partial_shape(0).rank.get_length() > len(rows) + 1:
            scaled = ops.reshape(scaled, ops.constant(np.array([*rows, columns], np.int64)), special_zero=False)
        return ops.convert(scaled, "f32")

    def _scales(self, stored: list[Stored], shape: list[int], factor: float) -> ov.Node:
        if factor == 1:
            return self.scales.node(stored, shape)
        return ops.constant((self.scales.numbers.astype(np.float32) * factor).astype(np.float16).reshape(shape))


def pack(
    weights: Weights, kind: str, path: Path, advance: Callable[[int], None], *, keep_finer: bool = True
) -> dict[str, PackedMatrix]:
    """Round all matrices of a decoder, by their names. path: a new file of them. advance: called with bytes read.

    Matrices that are one have all of their names.

    keep_finer: whether int4 has matrices in 8 bits that the source has in more bits than most.

    Raises:
        ExportError: when one is missing, or of a type that cannot be read.
        OSError: when the disk is full.
    """
    found = {name: weights.matrix(name) for name in matrices_of(weights)}
    forms = forms_of(found, keep_finer=keep_finer) if kind == "int4" else dict.fromkeys(found, OwnForm())
    wanted = {name: _kind_of(name, kind, matrix, forms[name]) for name, matrix in found.items()}
    joined = [{name: found[name].shape[0] for name in names} for names in _joined(weights.decoder, wanted)]
    for parts in joined:
        first = next(iter(parts))
        found[first] = below_each_other([found.pop(name) for name in parts])
    packed = _allocate(path, {name: (matrix.shape, *wanted[name]) for name, matrix in found.items()})
    read_all(found, lambda name, part: _round(found[name], packed[name], part), advance)
    for parts in joined:
        packed |= dict.fromkeys(parts, replace(packed[next(iter(parts))], parts=parts))
    return packed


def read_all(
    matrices: Mapping[str, Matrix], read: Callable[[str, slice], None], advance: Callable[[int], None]
) -> None:
    """Read matrices some rows at a time, on all processors. read: is given a matrix's name and the rows.

    Raises:
        ExportError: when one is of a type that cannot be read.
        OSError: when the disk is full.
    """

    def read_span(name: str, span: slice) -> int:
        rows, columns = matrices[name].shape
        step = max(1, _CHUNK // columns)
        for first in range(span.start, span.stop, step):
            read(name, slice(first, min(first + step, span.stop)))
        return int(matrices[name].num_bytes * (span.stop - span.start) // rows)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(read_span, name, span) for name, matrix in matrices.items() for span in _spans(matrix)]
        try:
            for job in as_completed(jobs):
                advance(job.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def matrices_of(weights: Weights) -> list[str]:
    """The names of a decoder's matrices."""
    decoder = weights.decoder
    layers = [
        layer_name(i, part)
        for i, layer in enumerate(decoder.layers)
        for part in (
            *(layer.attention if layer.state is None else layer.state.matrices),
            *([OUTPUT_GATE] if layer.state is None and decoder.arch.attention.gate in ("matrix", "heads") else ()),
            *((LAYER_GATE, LAYER_PROJECTION) if decoder.layer_embedding else ()),
            *((StreamPart.LAUREL_LEFT, StreamPart.LAUREL_RIGHT) if decoder.streams else ()),
            *decoder.feed_forward_of(layer),
            *(() if layer.experts is None else layer.experts.shapes),
        )
    ]
    own_head = weights.proposed is not None or not weights.is_tied
    of_layers = [LAYER_EMBEDDING, LAYER_INPUTS] if decoder.layer_embedding else []
    of_streams = decoder.streams.matrices if decoder.streams else []
    return [EMBEDDING, *of_layers, *of_streams, *layers, *([HEAD] if own_head else [])]


def _joined(decoder: Decoder, forms: Mapping[str, _Form]) -> Iterator[list[str]]:
    """The names of matrices that become one: of a layer, of the same form, and multiplied by the same rows."""
    for i, layer in enumerate(decoder.layers):
        alike: dict[_Form, list[str]] = {}
        for name in (layer_name(i, part) for part in layer.reading_alike):
            if name in forms:
                alike.setdefault(forms[name], []).append(name)
        yield from (names for names in alike.values() if len(names) > 1)


def _kind_of(name: str, kind: str, matrix: Matrix, form: OwnForm) -> tuple[str, int, int | None]:
    """The kind of weights of a matrix, its columns that share a scale, and its further columns; see `PackedMatrix`."""
    columns = matrix.shape[1]
    if matrix.is_mxfp4 and kind == "int8":
        return "int8", mxfp4.GROUP, None
    if kind == "int4" and is_plain(name) and form.has_codes:
        return kind, GROUP, num_sums(columns) if form.has_minima else 0
    rounds = name not in (EMBEDDING, LAYER_EMBEDDING, HEAD) and not name.endswith(_FINE) and not form.is_finer
    if kind == "int4" and rounds:
        group = next((size for size in _GROUPS if columns % size == 0), None)
        if group is not None:
            return kind, group, None
    return ("int8" if kind == "int4" else kind), columns, None


def _allocate(
    path: Path, wanted: Mapping[str, tuple[tuple[int, ...], str, int, int | None]]
) -> dict[str, PackedMatrix]:
    """Room in a new file for matrices of these shapes, kinds, groups and further columns."""
    layouts = [
        layout
        for (rows, columns), kind, group, sums in wanted.values()
        for layout in _layout((rows, columns + (sums or 0)), kind, group)
    ]
    arrays = allocate(path, layouts, lambda _: _ALIGNMENT)
    made = {}
    for (name, ((rows, columns), kind, group, sums)), first in zip(
        wanted.items(), range(0, len(arrays), 3), strict=True
    ):
        codes, zero_points, scales = arrays[first : first + 3]
        made[name] = PackedMatrix(kind, (rows, columns), group, codes, zero_points, scales, sums, {name: rows})
    return made


def allocate(
    path: Path, layouts: Iterable[tuple[type[np.generic], tuple[int, ...]]], alignment: Callable[[int], int]
) -> list[FileArray]:
    """Arrays of these types and shapes in a new file. alignment: of so many bytes.

    Raises:
        OSError: when the disk is full.
    """
    places, end = [], 0
    for dtype, shape in layouts:
        num_bytes = np.dtype(dtype).itemsize * math.prod(shape)
        begin = -(-end // alignment(num_bytes)) * alignment(num_bytes)
        places.append((dtype, shape, begin))
        end = begin + num_bytes
    end = max(-(-end // alignment(0)), 1) * alignment(0)
    with path.open("wb") as new:
        if hasattr(os, "posix_fallocate"):  # elsewhere, a full disk is found later
            os.posix_fallocate(new.fileno(), 0, end)
        new.truncate(end)
    data = np.memmap(path, dtype=np.uint8, mode="r+")
    file, lock = path.open("r+b"), Lock()
    return [FileArray(np.ndarray(shape, dtype, data, begin), begin, file, lock) for dtype, shape, begin in places]


def _layout(shape: tuple[int, int], kind: str, group: int) -> list[tuple[type[np.generic], tuple[int, int]]]:
    """The types and shapes of a matrix's codes, zero points and scales."""
    rows, columns = shape
    if kind in _FLOATS:
        return [(_FLOATS[kind], shape), (np.uint8, (rows, 0)), (np.float16, (rows, 0))]
    groups = (rows, columns // group)
    return [(np.uint8, (rows, columns // (2 if kind == "int4" else 1))), (np.uint8, groups), (np.float16, groups)]


def _spans(matrix: Matrix) -> list[slice]:
    """The rows of a thread's jobs: few, as each wakes the thread that waits for all of them."""
    rows, columns = matrix.shape
    step = max(1, _JOB // columns)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _round(matrix: Matrix, packed: PackedMatrix, part: slice) -> None:
    if packed.sums is not None and matrix.blocks is not None:
        codes, zero_points, scales = keep(matrix.blocks(part), packed.sums)
        packed.codes[part], packed.zero_points[part], packed.scales[part] = paired(codes), zero_points, scales
        return
    values = matrix.read(part)
    if packed.kind in _FLOATS:
        packed.codes[part] = values
        return
    if packed.kind == "int8" and packed.group < values.shape[1]:
        packed.codes[part], packed.zero_points[part], packed.scales[part] = mxfp4.exact(values)
        return
    largest = _LARGEST[packed.kind]
    if packed.sums is None:
        codes, zero_points, scales = rounded(values, packed.group, largest, in_place=values.flags.writeable)
    else:
        codes, zero_points, scales = keep(values, packed.sums)
    packed.codes[part] = codes if packed.kind == "int8" else paired(codes)
    packed.zero_points[part], packed.scales[part] = zero_points, scales
