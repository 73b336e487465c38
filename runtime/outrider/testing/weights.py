"""The random weights of a toy model, the same for every format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]

HIDDEN, HEADS, LAYERS, CONTEXT = 16, 2, 2, 2048
HEAD_SIZE = HIDDEN // HEADS
KERNEL = 4  # tokens that a convolution reads


@dataclass(frozen=True, slots=True)
class ToyLayer:
    """Attention, float32 [hidden, hidden] each, and a network of one hidden layer, [hidden, 2 hidden] and back."""

    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class ToyConvolution:
    """A causal depthwise convolution over the last tokens, [hidden, KERNEL], and a network as that of `ToyLayer`."""

    filters: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class ToyWeights:
    """Two layers with learned positions; weights are standard normal, scaled by fan-in.

    embedding: float32 [vocab_size, hidden]. positions: [context + 1, hidden]. output: [hidden, logits]. convolutions:
    of layers with a state, one before each layer with attention; none in models that keep keys and values alone.
    """

    embedding: Matrix
    positions: Matrix
    layers: list[ToyLayer]
    output: Matrix
    convolutions: Sequence[ToyConvolution] = ()


def random_weights(
    vocab_size: int,
    padding: int = 0,
    seed: int = 0,
    noise: float = 0.0,
    to_main: NDArray[np.int32] | None = None,
    proposed: Sequence[int] | None = None,
    states: bool = False,
) -> ToyWeights:
    """Weights as `outrider.testing.save_toy_model` describes them."""
    shared, own = np.random.default_rng(seed), np.random.default_rng(seed + 1)

    def random(rows: int, columns: int, scale: float | None = None) -> Matrix:
        values = shared.standard_normal((rows, columns)) + noise * own.standard_normal((rows, columns))
        return (values * (scale or rows**-0.5)).astype(np.float32)

    def of_tokens(rows: Matrix) -> Matrix:
        """Select the rows of the model's own tokens, float32 [own vocab, hidden]."""
        if to_main is None:
            return rows
        others = np.random.default_rng(seed + 2).standard_normal((len(to_main), rows.shape[1]))
        return np.where(to_main[:, None] >= 0, rows[to_main], others * rows.std()).astype(np.float32)

    embedding = of_tokens(random(vocab_size, HIDDEN, 1.0))
    positions = random(CONTEXT + 1, HIDDEN, 1.0)
    shapes = [(HIDDEN, HIDDEN)] * 4 + [(HIDDEN, 2 * HIDDEN), (2 * HIDDEN, HIDDEN)]
    layers = [ToyLayer(*(random(*shape) for shape in shapes)) for _ in range(LAYERS)]
    # The padding's logits are large, so that tests fail if they are not masked.
    real = of_tokens(random(HIDDEN, vocab_size).T).T
    output = np.concatenate([real, random(HIDDEN, padding, 20.0)], axis=1)
    convolutions = [
        ToyConvolution(random(HIDDEN, KERNEL, 1.0), random(HIDDEN, 2 * HIDDEN), random(2 * HIDDEN, HIDDEN))
        for _ in range(LAYERS if states else 0)
    ]
    output = output if proposed is None else output[:, list(proposed)]
    return ToyWeights(embedding, positions, layers, output, convolutions)
