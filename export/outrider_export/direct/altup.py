"""The graph of several residual streams of a token: AltUp and Laurel, as Gemma 3n has them; see `streams`.

    altup = AltUp(decoder, streams, weights, project, product)
    every = altup.begun(embedding)                        # float32 [batch, tokens, streams, hidden]
    predicted = altup.predicted(3, every)                 # before layer 3 …
    every = altup.corrected(3, predicted, computed)       # … and after it
    stream = altup.ended(every)                           # float32 [batch, tokens, hidden]

Source: Transformers 5.5, models/gemma3n/modeling_gemma3n.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.models.backends.nodes import floats, integer, ints
from outrider_export.direct.decoder import Decoder
from outrider_export.direct.nodes import rms_norm
from outrider_export.direct.streams import StreamPart, Streams
from outrider_export.direct.weights import Weights, layer_name

_LEAST = 1e-5  # of a mean square that is divided by


@dataclass(frozen=True)
class AltUp:
    """project: the product with a matrix of a layer. product: that with another matrix, by its name."""

    decoder: Decoder
    streams: Streams
    weights: Weights
    project: Callable[[int, str, ov.Node], ov.Node]
    product: Callable[[str, ov.Node], ov.Node]

    def begun(self, embedding: ov.Node) -> ov.Node:
        """All streams of an embedding float32 [batch, tokens, hidden]."""
        others = [self.product(f"{StreamPart.BEGIN}.{i}", embedding) for i in range(self.streams.count - 1)]
        made = [embedding, *(_as_large(each, embedding) for each in others)]
        return ops.concat([ops.unsqueeze(each, integer(2)) for each in made], 2)

    def ended(self, every: ov.Node) -> ov.Node:
        """One stream of all, float32 [batch, tokens, hidden]."""
        first = _stream(every, 0)
        others = [self.product(f"{StreamPart.END}.{i}", _stream(every, i + 1)) for i in range(self.streams.count - 1)]
        total = first
        for each in others:
            total = ops.add(total, _as_large(each, first))
        return ops.multiply(total, floats(np.full((1, 1, 1), 1 / self.streams.count)))

    def active(self, every: ov.Node) -> ov.Node:
        """The stream that a layer computes, float32 [batch, tokens, hidden]."""
        return _stream(every, self.streams.active)

    def predicted(self, i: int, every: ov.Node) -> ov.Node:
        """The streams as they are before layer i, by those after the layer before it."""
        count = self.streams.count
        modes = self._modes(i, self.active(every))
        mixing = self._small(i, StreamPart.PREDICTION, (count * count, count), modes)
        mixing = ops.reshape(mixing, ints(0, 0, count, count), special_zero=True)
        return ops.add(ops.matmul(mixing, every, False, False), every)

    def with_laurel(self, i: int, stream: ov.Node, read: ov.Node) -> ov.Node:
        """The stream after attention, with what layer i makes of `read` by two narrow matrices."""
        made = self.project(i, StreamPart.LAUREL_RIGHT, self.project(i, StreamPart.LAUREL_LEFT, read))
        weight = self.weights.numbers(f"{layer_name(i, StreamPart.LAUREL_NORM)}.weight", self.decoder.hidden_size)
        made = ops.add(read, rms_norm(made, weight, self.decoder.eps))
        return ops.multiply(ops.add(stream, made), floats(np.full((1, 1, 1), 2**-0.5)))

    def corrected(self, i: int, predicted: ov.Node, computed: ov.Node) -> ov.Node:
        """All streams after layer i has computed one of them."""
        count = self.streams.count
        innovation = ops.unsqueeze(ops.subtract(computed, self.active(predicted)), integer(2))
        factors = self._small(i, StreamPart.CORRECTION, (count, count), self._modes(i, computed))
        factors = ops.unsqueeze(ops.add(factors, floats(np.ones((1, 1, 1)))), integer(3))
        return ops.add(ops.multiply(innovation, factors), predicted)

    def scaled(self, i: int, every: ov.Node) -> ov.Node:
        """The active stream, as what reads the embeddings of layer i itself reads it."""
        found = self.active(every)
        if not self.streams.is_scaled:
            return found
        scale = self.weights.numbers(f"{layer_name(i, StreamPart.CORRECTED_SCALE)}.weight", self.decoder.hidden_size)
        return ops.multiply(found, floats(scale.reshape(1, 1, -1)))

    def added(self, every: ov.Node, made: ov.Node) -> ov.Node:
        """The streams, with float32 [batch, tokens, hidden] added to all but the first."""
        others = np.ones((1, 1, self.streams.count, 1), np.float32)
        others[:, :, 0] = 0
        return ops.add(every, ops.multiply(ops.unsqueeze(made, integer(2)), floats(others)))

    def _modes(self, i: int, stream: ov.Node) -> ov.Node:
        """A number for each stream, float32 [batch, tokens, streams]."""
        hidden = self.decoder.hidden_size
        weight = self.weights.numbers(f"{layer_name(i, StreamPart.ROUTER_NORM)}.weight", hidden) / np.float32(hidden)
        return ops.tanh(
            self._small(i, StreamPart.ROUTER, (self.streams.count, hidden), rms_norm(stream, weight, self.decoder.eps))
        )

    def _small(self, i: int, part: str, shape: tuple[int, int], x: ov.Node) -> ov.Node:
        """The product with a matrix of a few rows, which is not rounded."""
        matrix = self.weights.numbers(f"{layer_name(i, part)}.weight", shape[0] * shape[1]).reshape(shape)
        return ops.matmul(x, floats(matrix), False, True)


def _stream(every: ov.Node, i: int) -> ov.Node:
    return ops.gather(every, integer(i), integer(2))


def _as_large(x: ov.Node, other: ov.Node) -> ov.Node:
    """x with the magnitude of another one, by rows."""
    mine = ops.maximum(_mean_square(x), floats(np.full((1, 1, 1), _LEAST)))
    return ops.divide(ops.multiply(x, ops.sqrt(_mean_square(other))), ops.sqrt(mine))


def _mean_square(x: ov.Node) -> ov.Node:
    return ops.reduce_mean(ops.multiply(x, x), ints(-1), True)
