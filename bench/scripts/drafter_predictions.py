"""Predicts what published drafters would give on this machine: Qwen3-4B and 8B with EAGLE-3, DFlash and DSpark.

    python bench/scripts/drafter_predictions.py [--models 4B,8B] [--weights int8,int4] [--precision f32]

Nothing is downloaded. Layers of random weights in the published shapes are timed: two and four of the main model's, the
drafter's, and the output matrix, whole and cut to 32,768 rows. A layer's time is the difference; the main model's is
that of all its layers. Attention is left out: in short texts it takes little. The tokens of a round are those of
DSpark's paper (table 1, Qwen3-4B, chains of 7; DeepSeek 2026), also for the 8B. For shorter drafts, each token is taken
to be accepted with the same chance. So the speed-ups are predictions: nobody has run these models here.
"""

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.drafters import prediction

VOCAB, CUT = 151_936, 32_768
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
LONGEST = 7  # draft tokens
REPEATS = 7
GROUPS = {"int8": 128, "int4": 64}  # of dynamic quantisation, as Outrider mostly chooses
HOST = {"dspark": 0.0008}  # seconds of a draft on the host: the Markov correction (docs/drafters.md)
DATA = ("GSM8K", "HumanEval", "MT-Bench", "Alpaca", "Arena-Hard")
TOKENS = {  # a round, with `LONGEST` draft tokens
    "eagle3": (5.14, 4.16, 2.39, 2.26, 2.55),
    "dflash": (5.40, 4.74, 3.07, 2.96, 2.83),
    "dspark": (6.11, 5.38, 3.64, 3.54, 3.29),
}


@dataclass(frozen=True)
class Shape:
    """A decoder's. EAGLE-3's layer, and the layers of the block drafters, have the main model's sizes."""

    hidden: int
    wide: int
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128


SHAPES = {"4B": Shape(2560, 9728), "8B": Shape(4096, 12_288)}
BLOCK_LAYERS, BLOCK_STATES, EAGLE_STATES = 5, 5, 3


def main() -> None:
    """Measure, and print a table for each model and format of weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="4B,8B")
    parser.add_argument("--weights", default="int8,int4")
    parser.add_argument("--precision", default="f32", help="to calculate in")
    arguments = parser.parse_args()
    core = ov.Core()
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": arguments.precision}
    processor = core.get_property("CPU", "FULL_DEVICE_NAME")
    print(f"{processor}, OpenVINO {ov.__version__.split('-')[0]}, {arguments.precision}")
    for name in arguments.models.split(","):
        for weights in arguments.weights.split(","):
            config = hints | {"DYNAMIC_QUANTIZATION_GROUP_SIZE": str(GROUPS[weights])}
            show(name, weights, Costs(SHAPES[name], weights, functools.partial(core.compile_model, config=config)))


class Costs:
    """Seconds of calls, by their rows."""

    def __init__(self, shape: Shape, weights: str, compile_model: Callable[..., ov.CompiledModel]) -> None:
        hidden = shape.hidden
        self.shape, self._weights, self._compile = shape, weights, compile_model
        two, four = (self._time(functools.partial(self._layers, count=n), hidden) for n in (2, 4))
        self.layer = {n: max(four[n] - two[n], 0.0) / 2 for n in ROWS}
        rest = {n: max(two[n] - 2 * self.layer[n], 0.0) for n in ROWS}  # of a call, whatever its layers
        self.eagle_layer = self._time(functools.partial(self._layer, width=2 * hidden), hidden)
        self.matrix = {
            size: self._time(functools.partial(self._matrix, width=size, weights="int8"), hidden)
            for size in (VOCAB, CUT)
        }
        self.combine = {n: self._time(functools.partial(self._matrix, width=hidden), n * hidden) for n in (3, 5)}
        self.main = {n: shape.layers * self.layer[n] + rest[n] + self.matrix[VOCAB][n] for n in ROWS}

    def draft(self, kind: str, length: int, read: float, vocab: int) -> float:
        """Seconds of a draft. read: tokens of the last round, whose hidden states are read. vocab: rows of logits."""
        if kind == "eagle3":
            first = at(self.combine[EAGLE_STATES], read) + at(self.eagle_layer, read) + self.matrix[vocab][1]
            return first + (length - 1) * (self.eagle_layer[1] + self.matrix[vocab][1])
        rows = length + (kind == "dflash")  # DFlash's newest token gives none
        block = BLOCK_LAYERS * at(self.layer, rows) + at(self.matrix[vocab], length)
        # Left out: keys and values of the context, a product with small matrices in each layer.
        return at(self.combine[BLOCK_STATES], read) + block + HOST.get(kind, 0.0)

    def _layers(self, x: ov.Output, count: int) -> ov.Output:
        for _ in range(count):
            x = self._layer(x, self.shape.hidden)
        return x

    def _layer(self, x: ov.Output, width: int) -> ov.Output:
        """A layer whose attention reads nothing. width: of the input of the projections (EAGLE-3's is doubled)."""
        shape, normed = self.shape, norm(x)
        if width > shape.hidden:
            normed = ops.concat([normed, norm(x)], 1).output(0)
        size = shape.heads * shape.head_size
        queries = self._matrix(normed, size)
        keys, values = (self._matrix(normed, shape.kv_heads * shape.head_size) for _ in range(2))
        shared = ops.concat([ops.multiply(keys, values)] * (shape.heads // shape.kv_heads), 1)
        x = ops.add(x, self._matrix(ops.multiply(queries, shared).output(0), shape.hidden)).output(0)
        normed = norm(x)
        gated = ops.multiply(ops.swish(self._matrix(normed, shape.wide)), self._matrix(normed, shape.wide))
        return ops.add(x, self._matrix(gated.output(0), shape.hidden)).output(0)

    def _matrix(self, x: ov.Output, width: int, weights: str = "") -> ov.Output:
        """The product with random weights of `width` rows, in the form that exports have."""
        columns = x.get_partial_shape()[1].get_length()
        return ops.matmul(x, random_matrix(width, columns, weights or self._weights), False, True).output(0)

    def _time(self, build: Callable[[ov.Output], ov.Output], width: int) -> dict[int, float]:
        """Seconds of calls with these rows: the shortest of a few, as other work can only add to them."""
        rows = ops.parameter([-1, width], np.float32)
        request = self._compile(ov.Model([ops.result(build(rows.output(0)))], [rows]), "CPU").create_infer_request()
        found = {}
        for count in ROWS:
            request.set_input_tensor(ov.Tensor(np.ones((count, width), dtype=np.float32)))
            seconds = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                request.infer()
                seconds.append(time.perf_counter() - began)
            found[count] = min(seconds)
        del request
        gc.collect()
        return found


def random_matrix(rows: int, columns: int, weights: str) -> ov.Node:
    """Weights in 8 bits with a scale for each row, or in 4 bits in groups of 64."""
    rng = np.random.default_rng(rows + columns)
    bits, groups = (8, 1) if weights == "int8" else (4, columns // 64)
    data = rng.integers(0, 256, rows * columns * bits // 8, dtype=np.uint8)
    kind = ov.Type.u8 if bits == 8 else ov.Type.u4
    grouped = [rows, columns] if bits == 8 else [rows, groups, 64]
    scaled = [rows, 1] if bits == 8 else [rows, groups, 1]
    constant = ov.op.Constant(ov.Tensor(data.reshape(-1), ov.Shape(grouped), kind), shared_memory=False)
    # In the codes' own type: OpenVINO multiplies in 8 bits only then.
    middle = np.full((np.prod(scaled) * bits + 7) // 8, 128 if bits == 8 else 0x88, dtype=np.uint8)
    zero_points = ov.op.Constant(ov.Tensor(middle, ov.Shape(scaled), kind), shared_memory=False)
    scale = ops.constant(np.full(scaled, 1e-3, dtype=np.float16))
    made: ov.Node = ops.multiply(ops.subtract(ops.convert(constant, "f16"), ops.convert(zero_points, "f16")), scale)
    if bits == 4:
        made = ops.reshape(made, ops.constant(np.array([rows, columns], dtype=np.int64)), False)
    return ops.convert(made, "f32")


def norm(x: ov.Output) -> ov.Output:
    """RMSNorm without weights."""
    mean = ops.reduce_mean(ops.multiply(x, x), ops.constant(np.array([1], dtype=np.int64)), True)
    return ops.divide(x, ops.sqrt(ops.add(mean, ops.constant(np.float32(1e-6))))).output(0)


def at(seconds: Mapping[int, float], rows: float) -> float:
    """Between the measured rows."""
    return float(np.interp(rows, [*seconds], [*seconds.values()]))


def chance_of(published: float) -> float:
    """The chance of acceptance a of each token, where a round of `LONGEST` gives 1 + a + … + a^LONGEST tokens."""
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        low, high = (chance, high) if tokens_of(chance, LONGEST) < published else (low, chance)
    return low


def tokens_of(chance: float, length: int) -> float:
    """Tokens of a round with so many draft tokens."""
    return sum(chance**i for i in range(length + 1))


def best(costs: Costs, kind: str, vocab: int) -> tuple[int, list[float]]:
    """The draft length with the largest mean speed-up over the data sets, and its speed-up in each."""
    check = [at(costs.main, rows) for rows in range(1, LONGEST + 2)]
    found = []
    for chance in map(chance_of, TOKENS[kind]):
        draft = [costs.draft(kind, k, tokens_of(chance, k), vocab) for k in range(1, LONGEST + 1)]
        made = prediction.predictions([chance] * LONGEST, prediction.Costs(check, draft))
        found.append([each.speed_up for each in made])
    means = [statistics.geometric_mean(each) for each in zip(*found, strict=True)]
    length = means.index(max(means)) + 1
    return length, [each[length - 1] for each in found]


def show(name: str, weights: str, costs: Costs) -> None:
    """Print costs and predictions of one main model."""
    print(f"\nQwen3-{name}, {weights}: milliseconds of the main model's calls, by rows (predicted from its layers)")
    print("  " + "  ".join(f"{n}: {1e3 * seconds:.0f}" for n, seconds in costs.main.items()))
    print("\n| drafter | output matrix | draft of 7 (of a pass) | best length | " + " | ".join(DATA) + " | mean |")
    print("|---" * (5 + len(DATA)) + "|")
    for kind in TOKENS:
        for vocab in (VOCAB, CUT):
            length, speed_ups = best(costs, kind, vocab)
            seconds = costs.draft(kind, 7, 4, vocab)
            cells = [kind, f"{vocab:,}", f"{1e3 * seconds:.0f} ms ({seconds / costs.main[1]:.2f})", str(length)]
            cells += [f"{each:.2f}" for each in (*speed_ups, statistics.geometric_mean(speed_ups))]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
