"""Norms, angles of rotation and masks of attention, in the forms that OpenVINO's passes find."""

from __future__ import annotations

import numpy as np
import openvino as ov
from numpy.typing import ArrayLike
from openvino import opset13 as ops

from outrider.models.backends.embeds import AXES
from outrider.models.backends.nodes import floats, integer, ints, size_of
from outrider.types import LONG_POSITION
from outrider_export.direct.rope import Rope


def rms_norm(x: ov.Node | ov.Output, weight: ArrayLike | None, eps: float) -> ov.Node:
    """x / √(mean(x²) + eps) · weight, over the last axis. weight: None for ones."""
    ones = [1] * rank_of(x)
    squares = ops.power(x, floats(np.full(ones, 2)))
    means = ops.add(ops.reduce_mean(squares, ints(-1), True), floats(np.full(ones, eps)))
    normed = ops.multiply(x, ops.divide(floats(np.ones(ones)), ops.sqrt(means)))
    if weight is None:
        return normed
    return ops.multiply(normed, floats(np.reshape(weight, (*ones[:-1], -1))))


def rank_of(x: ov.Node | ov.Output) -> int:
    """How many axes a node's only output has, or an output."""
    return len((x.output(0) if isinstance(x, ov.Node) else x).get_partial_shape())


def angles_of(rope: Rope, positions: ov.Node) -> ov.Node:
    """Angles float32 [batch, n, tokens] at positions int64 [batch, 1, tokens].

    Where long texts have frequencies of their own, their positions begin at `LONG_POSITION`: so each row of a call says
    by which set it is rotated. Where positions have three axes, the runtime finds these by the node's name.
    """
    if rope.axes is not None:
        frequencies = np.zeros((1, len(rope.axes), 3), np.float32)
        frequencies[0, np.arange(len(rope.axes)), rope.axes] = rope.frequencies
        along = ops.tile(positions, ints(1, 3, 1))
        along.set_friendly_name(AXES)
        return ops.matmul(floats(frequencies), ops.convert(along, "f32"), False, False)
    short = floats(rope.frequencies.reshape(1, -1, 1))
    if rope.long is None:
        return ops.matmul(short, ops.convert(positions, "f32"), False, False)
    first = ops.constant(np.full((1, 1, 1), LONG_POSITION, np.int64))
    is_long = ops.greater_equal(positions, first)
    positions = ops.select(is_long, ops.subtract(positions, first), positions)
    frequencies = ops.select(is_long, floats(rope.long.reshape(1, -1, 1)), short)
    return ops.multiply(frequencies, ops.convert(positions, "f32"))


_LOWEST = -65504.0  # of float16, as in optimum-intel's graphs


class Masks:
    """Masks float32 [batch, 1, tokens, all tokens] of 0 and −65504, by the sliding window.

    A token attends to itself and to tokens before it that attention_mask has: to all of them, or to as many as are in
    the window, itself among them.
    """

    def __init__(self, input_ids: ov.Node, attention_mask: ov.Node) -> None:
        self._input_ids, self._attention_mask = input_ids, attention_mask
        self._past: ov.Node | None = None
        self._made: dict[int, ov.Node] = {}

    def read_past(self, past: ov.Node) -> None:
        """Record the cached keys [batch, heads, past tokens, size]; the first layer's are taken."""
        self._past = self._past or past

    def of(self, window: int) -> ov.Node:
        """The mask of a window; 0 for none."""
        if window not in self._made:
            self._made[window] = self._make(window)
        return self._made[window]

    def _make(self, window: int) -> ov.Node:
        if self._past is None:
            raise AssertionError("keys are cached before they are attended to")
        past, new = size_of(self._past, 2), size_of(self._input_ids, 1)
        total = ops.add(past, new)
        zero, one = ops.constant(np.int32(0)), ops.constant(np.int32(1))
        keys = unsqueezed(ops.range(zero, total, one, "i64"), 0, 1, 2)
        first = ops.gather(ops.range(past, total, one, "i64"), integer(0), integer(0))
        queries = unsqueezed(ops.add(ops.range(zero, new, one, "i64"), first), 0, 1, 3)
        seen = ops.less_equal(keys, queries)
        if window:
            limit = ops.add(queries, ops.constant(np.full((1, 1, 1, 1), -window, dtype=np.int64)))
            within = ops.bitwise_and(ops.constant(np.array(True)), ops.greater(keys, limit))
            seen = ops.bitwise_and(within, seen)
        seen = ops.bitwise_and(ops.constant(np.array(True)), seen)
        given = ops.convert(self._attention_mask, "boolean")
        seen = ops.bitwise_and(seen, unsqueezed(given, 1, 2))
        shape = ops.concat([unsqueezed(each, 0) for each in (size_of(self._input_ids, 0), integer(1), new, total)], 0)
        seen = ops.broadcast(seen, shape, "BIDIRECTIONAL")
        return ops.select(seen, floats(0), floats(_LOWEST))


def unsqueezed(x: ov.Node, *axes: int) -> ov.Node:
    """x with further axes of length 1, one after the other."""
    for axis in axes:
        x = ops.unsqueeze(x, integer(axis))
    return x
