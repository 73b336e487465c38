"""Finds the 4-bit codes that weights have already, as those of GGUF's Q4_0, Q4_1 and Q4_K, to keep them in int4.

    own = own_codes(blocks)      # of float32 [n, 32]: scale · code + minimum
    form = form_of(matrix)       # whether a matrix consists of such blocks, and whether it needs further columns
    codes, zero_points, scales = keep(values, sums=32)

Codes are found by the weights' values, so rows may be in any order, and any format will do that has such blocks.

Runtimes have zero points of 4 bits: scale · (code − zero point). A minimum rounded to one is off by up to half a step,
on average as much as 4 bits lose anyway. What is left over of it, times the sum of the inputs of its block, is missing
in a product. So the leftovers become further columns of the matrix, in 4 bits, too, and these sums are appended to what
is multiplied. As `gguf_minima` does for weights that are not converted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.models.backends.projections import ATTENTION
from outrider_export.direct.codes import rounded
from outrider_export.direct.weights import OUTPUT_GATE, Rows, StoredMatrix, layer_of

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
_PRODUCTS = (*ATTENTION, OUTPUT_GATE, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class OwnCodes:
    """The codes of n blocks.

    codes: uint8 [n, 32]. zero_points: uint8, scales, leftovers: float32, known: bool, all [n]. A known block is scale ·
    (code − zero point) + leftover. The others' values mean nothing.
    """

    codes: NDArray[np.uint8]
    zero_points: NDArray[np.uint8]
    scales: Rows
    leftovers: Rows
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


def own_codes(blocks: Rows) -> OwnCodes:
    """The codes of blocks, float32 [n, 32]."""
    with np.errstate(all="ignore"):  # what is no number has no codes
        return _own_codes(blocks)


def _own_codes(blocks: Rows) -> OwnCodes:
    lowest = blocks.min(-1)
    above = blocks - lowest[:, None]
    spans = above.max(-1)
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
    steps_below = np.divide(-lowest, scales, out=np.zeros_like(lowest), where=known & (scales > 0))
    zero_points = np.clip(np.rint(steps_below), 0, LARGEST)
    leftovers = np.where(known, lowest + scales * zero_points, 0).astype(np.float32)
    return OwnCodes(codes, zero_points.astype(np.uint8), scales, leftovers, known)


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


def keep(values: Rows, sums: int = 0) -> Codes:
    """Codes uint8 [rows, columns + sums], zero points uint8 and scales float32 [rows, groups of 32].

    values: float32 [rows, columns]; blocks without codes of their own are rounded. sums: a multiple of 32 that has room
    for the leftovers of all blocks; 0 to leave them out.
    """
    rows = len(values)
    blocks = values.reshape(-1, GROUP)
    own = own_codes(blocks)
    codes, zero_points, scales = own.codes, own.zero_points, own.scales
    if not own.known.all():
        others = ~own.known
        new_codes, new_zero_points, new_scales = rounded(blocks[others], GROUP, LARGEST)
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


def keep_minima(values: Rows) -> tuple[NDArray[np.uint8], Rows, Rows]:
    """Codes uint8 [rows, columns], scales and minima float32 [rows, groups]: scale · code + minimum. For look-ups."""
    blocks = values.reshape(-1, GROUP)
    own = own_codes(blocks)
    lowest = blocks.min(-1)
    scales = np.where(own.known, own.scales, (blocks.max(-1) - lowest) / np.float32(LARGEST))
    others = ~own.known
    steps = np.where(scales == 0, 1, scales)[others, None]
    own.codes[others] = np.rint((blocks[others] - lowest[others, None]) / steps)
    shape = len(values), -1
    return own.codes.reshape(values.shape), scales.reshape(shape), lowest.reshape(shape)


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
    own = own_codes(matrix.read(slice(0, min(_PROBED, rows))).reshape(-1, GROUP))
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
