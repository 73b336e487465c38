"""Masks of attention, in the form in which OpenVINO's passes find sliding windows."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.models.backends.nodes import floats, integer, size_of

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
