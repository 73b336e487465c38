"""Finds the 4-bit codes that weights have already, as those of GGUF's Q4_0, Q4_1 and Q4_K, to keep them in int4.

    own = own_codes(blocks)      # of float32 [n, 32]: scale · code + minimum
    form = form_of(matrix)       # whether a matrix consists of such blocks, and whether it needs further columns
    codes, zero_points, scales = keep(values, sums=32)

Codes are found by the weights' values, so rows may be in any order, and any format will do that has such blocks.

Runtimes have zero points of 4 bits: scale · (code − zero point). A minimum rounded to one is off by up to half a step,
on average as much as 4 bits lose anyway. What is left over of it, times the sum of the inputs of its block, is missing
in a product. So the leftovers become further columns of the matrix, in 4 bits, too, and these sums are appended to what
is multiplied: 1/32 more columns and 5 to 10 % more time, and an error of 0.5 % instead of 8 % of a matrix. OpenVINO
(2026.4) accepts zero points that are no integers, but computes without 8-bit activations then, which takes twice as
long from five rows on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.models.backends.projections import ATTENTION
from outrider_export.direct.codes import rounded
from outrider_export.direct.decoder import OUTPUT_GATE
from outrider_export.direct.weights import Rows, StoredMatrix, layer_of
from outrider_export.sources.gguf_values import StoredBlocks, of_groups

# Codes, zero points, and scales in float32 or float16.
Codes: TypeAlias = "tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[Any]]"
GROUP = 32  # weights that share a scale and a minimum
LARGEST = 15  # code
# What a block may differ from its codes, as the sum of squares in steps: those of float16 by 0.001, others by about 3.
_OFF = 0.05
_WHOLE = 0.01  # steps: smaller leftovers are none
_LEAST_KNOWN = 0.9  # of a matrix's blocks
_PROBED = 4  # rows
_HALF = 1e-5  # relative; scales that are as close to a float16 number are that number
# Bits of a weight, scales included: Q5_1 has 6.0, Q6_K 6.6. Of the 5-bit types, 4 bits lose little.
_MOST_FOR_4 = 6.25
_EACH_BYTE = 0x0101010101010101
TYPES_IN_4_BITS = ("Q4_0", "Q4_1", "Q4_K")  # of GGUF's tensors, whose codes these are
_PRODUCTS = (*ATTENTION, OUTPUT_GATE, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class OwnCodes:
    """The codes of n blocks.

    A known block is scale · (code − zero point) + leftover. The others' values mean nothing, but for `lowest`.
    """

    codes: NDArray[np.uint8]  # [n, 32]; everything else [n]
    zero_points: NDArray[np.uint8]
    scales: Rows
    leftovers: Rows
    lowest: Rows  # the smallest value
    known: NDArray[np.bool_]


@dataclass(frozen=True)
class OwnForm:
    """How int4 stores a matrix. has_codes: its blocks have codes of 4 bits. has_minima: they have leftovers, too.

    is_finer: its file has it in more bits than most of its weights, so 4 bits are too few.
    """

    has_codes: bool = False
    has_minima: bool = False
    is_finer: bool = False

    def __or__(self, other: OwnForm) -> OwnForm:
        """The form of two matrices in one."""
        return OwnForm(
            self.has_codes or other.has_codes, self.has_minima or other.has_minima, self.is_finer or other.is_finer
        )


def own_codes(values: Rows | StoredBlocks) -> OwnCodes:
    """The codes of blocks of 32, float32 [n · 32] in any shape, or as a file has them."""
    with np.errstate(all="ignore"):  # what is no number has no codes
        if isinstance(values, StoredBlocks):
            return _stored_codes(values)
        return _own_codes(values.reshape(-1, GROUP))


def _stored_codes(stored: StoredBlocks) -> OwnCodes:
    """The same without values, where codes reach from 0 to 15 or nearly so, as those of most blocks do."""
    codes, scales = stored.in_order(np.uint8).reshape(-1, GROUP), stored.scales.reshape(-1)
    shifts = np.zeros_like(scales) if stored.shifts is None else stored.shifts.reshape(-1)
    first, steps = np.zeros(len(codes), np.uint8), np.full(len(codes), LARGEST, np.uint8)
    shorter = np.flatnonzero(~(_have(0, codes) & _have(LARGEST, codes)))
    rest = codes[shorter]
    first[shorter] = of_groups(np.minimum, rest)
    steps[shorter] = of_groups(np.maximum, rest) - first[shorter]
    rest -= first[shorter, None]
    codes[shorter] = rest
    usual = np.isfinite(scales) & np.isfinite(shifts) & (scales > 0)
    # Codes up to 14 that are all close to 0 or 14 are as close to codes up to 15.
    off = np.minimum(rest, LARGEST - 1 - rest).astype(np.uint16)  # fourteenths of a step
    far = of_groups(np.add, off * off) > _OFF * (LARGEST - 1) ** 2
    usual[shorter] &= (steps[shorter] == LARGEST) | ((steps[shorter] == LARGEST - 1) & far)
    lowest, highest = (scales * codes_of_ends + shifts for codes_of_ends in (first, first + steps))
    of_steps = np.where(steps == LARGEST, np.float32(1 / LARGEST), np.float32(1 / (LARGEST - 1)))
    made = _with_zero_points(codes, lowest, _as_half((highest - lowest) * of_steps), usual)
    if len(others := np.flatnonzero(~usual)):
        values = (codes[others] + first[others, None]) * scales[others, None] + shifts[others, None]
        found = _own_codes(values)
        for field in dataclasses.fields(OwnCodes):
            getattr(made, field.name)[others] = getattr(found, field.name)
    return made


def _have(code: int, codes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether blocks uint8 [n, 32] have a code, eight at a time: the top bit of a byte is set where it was 0 before."""
    words = codes.view(np.uint64) ^ np.uint64(code * _EACH_BYTE)
    words -= np.uint64(_EACH_BYTE)
    found: NDArray[np.bool_] = (of_groups(np.bitwise_or, words) & np.uint64(0x80 * _EACH_BYTE)) != 0
    return found


def _own_codes(blocks: Rows) -> OwnCodes:
    lowest = of_groups(np.minimum, blocks)
    above = blocks - lowest[:, None]
    spans = of_groups(np.maximum, blocks) - lowest  # rounding does not change the order
    codes, scales, known = _fitting(above, spans, LARGEST)  # most blocks have the codes 0 and 15
    waiting = np.flatnonzero(~known & (spans > 0) & np.isfinite(spans))
    for steps in range(LARGEST - 1, 0, -1):
        if not len(waiting):
            break
        found, scale, fits = _fitting(above[waiting], spans[waiting], steps)
        those = waiting[fits]
        codes[those], scales[those], known[those] = found[fits], scale[fits], True
        waiting = waiting[~fits]
    known |= (spans == 0) & (lowest == 0)
    return _with_zero_points(codes, lowest, scales, known)


def _with_zero_points(codes: NDArray[np.uint8], lowest: Rows, scales: Rows, known: NDArray[np.bool_]) -> OwnCodes:
    """Codes of blocks whose smallest values are `lowest`, float32 [n]."""
    steps_below = np.divide(-lowest, scales, out=np.zeros_like(lowest), where=known & (scales > 0))
    zero_points = np.clip(np.rint(steps_below), 0, LARGEST)
    leftovers = np.where(known, lowest + scales * zero_points, 0).astype(np.float32)
    return OwnCodes(codes, zero_points.astype(np.uint8), scales, leftovers, lowest, known)


def _fitting(above: Rows, spans: Rows, steps: int) -> tuple[NDArray[np.uint8], Rows, NDArray[np.bool_]]:
    """Codes and scales if the largest code is `steps`, and which blocks fit. above: float32 [n, 32], minima taken off.

    spans: float32 [n], their largest values.
    """
    scales = _as_half(spans * np.float32(1 / steps))
    found = above * (1 / scales)[:, None]
    whole = np.rint(found)
    found -= whole
    fits = (np.einsum("ij,ij->i", found, found) < _OFF) & (scales > 0)
    return whole.astype(np.uint8), scales, fits


def _as_half(scales: Rows) -> Rows:
    half = scales.astype(np.float16).astype(np.float32)
    return np.where(np.abs(half - scales) <= _HALF * scales, half, scales)


def keep(values: Rows | StoredBlocks, sums: int = 0) -> Codes:
    """Codes uint8 [rows, columns + sums], zero points uint8 and scales float32 [rows, groups of 32].

    values: float32 [rows, columns], or blocks of 32; those without codes of their own are rounded. sums: a multiple of
    32 that has room for the leftovers of all blocks; 0 to leave them out.
    """
    rows, own = len(values), own_codes(values)
    codes, zero_points, scales = own.codes, own.zero_points, own.scales
    if not own.known.all():
        others = ~own.known
        new_codes, new_zero_points, new_scales = rounded(_values(values)[others], GROUP, LARGEST)
        codes[others], zero_points[others], scales[others] = new_codes, new_zero_points[:, 0], new_scales[:, 0]
    codes, zero_points, scales = codes.reshape(rows, -1), zero_points.reshape(rows, -1), scales.reshape(rows, -1)
    if not sums:
        return codes, zero_points, scales
    leftovers = own.leftovers.reshape(rows, -1)
    leftovers = np.pad(leftovers, ((0, 0), (0, sums - leftovers.shape[1])))
    more_codes, more_zero_points, more_scales = rounded(leftovers, GROUP, LARGEST)
    return (
        np.concatenate([codes, more_codes], -1),
        np.concatenate([zero_points, more_zero_points], -1),
        np.concatenate([scales, more_scales.astype(np.float32)], -1),
    )


def keep_minima(values: Rows | StoredBlocks) -> tuple[NDArray[np.uint8], Rows, Rows]:
    """Codes uint8 [rows, columns], scales and minima float32 [rows, groups]: scale · code + minimum. For look-ups."""
    rows, own = len(values), own_codes(values)
    scales, lowest = own.scales, own.lowest
    if not own.known.all():
        others = ~own.known
        blocks = _values(values)[others]
        scales[others] = (of_groups(np.maximum, blocks) - lowest[others]) / np.float32(LARGEST)
        steps = np.where(scales == 0, 1, scales)[others, None]
        own.codes[others] = np.rint((blocks - lowest[others, None]) / steps)
    return own.codes.reshape(rows, -1), scales.reshape(rows, -1), lowest.reshape(rows, -1)


def _values(values: Rows | StoredBlocks) -> Rows:
    """As float32 [n, 32]."""
    return (values.values() if isinstance(values, StoredBlocks) else values).reshape(-1, GROUP)


def num_sums(columns: int) -> int:
    """The further columns that leftovers of so many columns take: whole groups."""
    return -(-columns // GROUP**2) * GROUP


def forms_of(matrices: Mapping[str, StoredMatrix], *, keep_finer: bool = True) -> dict[str, OwnForm]:
    """The forms of a decoder's matrices, by their names. keep_finer: whether some can be finer than the others.

    Raises:
        ExportError: when one is of a type that cannot be read.
    """
    forms = {name: form_of(each) for name, each in matrices.items()}
    finer = _finer(matrices, forms) if keep_finer else set()
    return {name: OwnForm(is_finer=True) if name in finer else form for name, form in forms.items()}


def form_of(matrix: StoredMatrix) -> OwnForm:
    """The form of a matrix, by its first rows."""
    rows, columns = matrix.shape
    if columns % GROUP:
        return OwnForm()
    own = own_codes(matrix.read(slice(0, min(_PROBED, rows))))
    if own.known.mean() < _LEAST_KNOWN or not own.scales.any():
        return OwnForm()
    return OwnForm(has_codes=True, has_minima=bool((np.abs(own.leftovers) > _WHOLE * own.scales).any()))


def is_plain(name: str) -> bool:
    """Whether a matrix is multiplied by rows as they are: not one of experts, or of a layer with a state."""
    layer, part = layer_of(name)
    return layer is not None and part in _PRODUCTS


def _finer(matrices: Mapping[str, StoredMatrix], forms: Mapping[str, OwnForm]) -> set[str]:
    """The matrices that have more bits than most of the weights; none, if most have more than 4 to 6.

    Dequantised weights that have codes have 4 bits, too.
    """
    sizes = {name: math.prod(each.shape) for name, each in matrices.items() if is_plain(name)}
    bits = {name: 8 * matrices[name].num_bytes / size for name, size in sizes.items()}
    finer = {name for name in sizes if bits[name] > _MOST_FOR_4 and not forms[name].has_codes}
    return finer if 2 * sum(sizes[name] for name in finer) <= sum(sizes.values()) else set()
