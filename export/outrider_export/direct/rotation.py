"""The angles by which queries and keys are rotated."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.models.backends.embeds import AXES
from outrider.models.backends.nodes import floats, ints
from outrider.types import LONG_POSITION
from outrider_export.direct.rope import Rope


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
