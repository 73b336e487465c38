"""What the graphs of all vision encoders are made of: their weights, and the parts of a layer.

Rows are the patches of one image, or of all its tiles, [n, width].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import ArrayLike, NDArray
from openvino import opset13 as ops

from outrider.errors import ExportError
from outrider.models.backends.nodes import floats, integer, ints, parameter, result, silu, transposed
from outrider_export.direct.codes import matrix_node
from outrider_export.direct.nodes import rms_norm
from outrider_export.sources.safetensors import Tensor
from outrider_export.sources.source import AGAIN


class VisionGraph(ABC):
    """The graph of one encoder.

    tensors: by the names that the graph asks for. config: its vision_config. weights: the main model's.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], weights: str, num_heads: int
    ) -> None:
        self.folder, self.tensors, self.config, self.weights = folder, tensors, config, weights
        self.width = int(config.get("embed_dim") or config["hidden_size"])
        self.num_heads = num_heads
        self.inputs: list[Any] = []
        self.windows: tuple[Any, Any, Any] | None = None

    @abstractmethod
    def model(self) -> ov.Model:
        """The whole graph. Its output is image_embeds float32 [tiles, tokens, hidden], or with all rows in one."""

    def finished(self, embeds: ov.Node) -> ov.Model:
        """The whole graph, of the embeddings [tokens, hidden] that it ends with."""
        return ov.Model([result("image_embeds", ops.unsqueeze(embeds, ints(0)))], self.inputs, "vision")

    def input(self, name: str, kind: ov.Type, shape: tuple[int, ...]) -> Any:
        """A further input of the graph."""
        made = parameter(name, kind, shape)
        self.inputs.append(made)
        return made

    def add_windows(self, name: str = "window") -> tuple[Any, Any, Any]:
        """Have inputs that say which rows attend to each other; see `outrider.inputs.vision.grids.windows_of`."""
        members = self.input(f"{name}_members", ov.Type.i64, (-1, -1))
        mask = self.input(f"{name}_mask", ov.Type.f32, (-1, 1, 1, -1))
        self.windows = members, mask, self.input(f"{name}_places", ov.Type.i64, (-1,))
        return self.windows

    def in_heads(self, x: ov.Node) -> ov.Node:
        """Rows as heads, [n, heads, size]."""
        return ops.reshape(x, ints(-1, self.num_heads, self.width // self.num_heads), special_zero=False)

    def attended(
        self, parts: Sequence[ov.Node], num_rows: int | None = None, *, within: bool = False, scale: float | None = None
    ) -> ov.Node:
        """What queries, keys and values, each [n, heads, size], find: float32 [n, width].

        num_rows: each so many rows attend to themselves; None for all. within: those of a window do. scale: of
        products; None for the usual one.
        """
        size = self.width // self.num_heads
        mask, places = floats(np.zeros((1, 1, 1, 1))), None
        if within and self.windows is not None:
            members, mask, places = self.windows
            batched = [ops.gather(each, members, integer(0)) for each in parts]
        elif num_rows is None:
            batched = [ops.unsqueeze(each, ints(0)) for each in parts]
        else:
            shape = ints(-1, num_rows, self.num_heads, size)
            batched = [ops.reshape(each, shape, special_zero=False) for each in parts]
        turned = [transposed(each, 0, 2, 1, 3) for each in batched]  # [windows, heads, n, size]
        factor = floats(size**-0.5 if scale is None else scale)
        found = transposed(ops.scaled_dot_product_attention(*turned, mask, factor), 0, 2, 1, 3)
        found = ops.reshape(found, ints(-1, self.width), special_zero=False)
        return found if places is None else ops.gather(found, places, integer(0))

    def rotation(self, positions: ov.Node, frequencies: NDArray[np.float32]) -> tuple[ov.Node, ov.Node]:
        """Cosines and sines, float32 [n, 1, size of a head]: of rows in one half, and of columns in the other.

        positions: int64 [n, 2]. frequencies: of both, float32 [2, size / 4].
        """
        angles = ops.multiply(ops.convert(ops.unsqueeze(positions, ints(2)), "f32"), floats(frequencies[None]))
        angles = ops.reshape(angles, ints(-1, 1, frequencies.size), special_zero=False)
        angles = ops.concat([angles, angles], 2)
        return ops.cos(angles), ops.sin(angles)

    def norm(self, name: str, x: ov.Node, eps: float) -> ov.Node:
        """By mean and variance if it has a bias, else by the root mean square."""
        weight = self.numbers(f"{name}.weight")
        if f"{name}.bias" not in self.tensors:
            return rms_norm(x, weight, eps)
        normed = ops.mvn(x, ints(-1), True, eps, "INSIDE_SQRT")
        return ops.add(ops.multiply(normed, floats(weight[None])), floats(self.numbers(f"{name}.bias")[None]))

    def activated(self, x: ov.Node, kind: str) -> ov.Node:
        """Raises ExportError when the activation is not known."""
        if kind == "quick_gelu":
            return ops.multiply(x, ops.sigmoid(ops.multiply(x, floats([[1.702]]))))
        if kind == "silu":
            return silu(x)
        if kind in ("gelu", "gelu_pytorch_tanh"):
            return ops.gelu(x, "ERF" if kind == "gelu" else "TANH")
        raise ExportError(f"{self.folder} has a vision encoder with the activation {kind!r}, which is not known.")

    def linear(self, name: str, x: ov.Node) -> ov.Node:
        """A product with a matrix, and its bias if it has one."""
        return self.biased(name, ops.matmul(x, self.matrix(self.numbers(f"{name}.weight")), False, True))

    def biased(self, name: str, x: ov.Node) -> ov.Node:
        """Rows plus a bias, if there is one."""
        if f"{name}.bias" not in self.tensors:
            return x
        return ops.add(x, floats(self.numbers(f"{name}.bias")[None]))

    def matrix(self, values: NDArray[np.float32]) -> ov.Node:
        """A matrix in the weights' format, as float32."""
        return matrix_node(values, self.weights)

    def numbers(self, name: str) -> NDArray[np.float32]:
        """A tensor, float32. Raises ExportError when it is missing."""
        if name not in self.tensors:
            raise ExportError(f"{self.folder} has no {name} for its vision encoder. {AGAIN}")
        found: NDArray[np.float32] = self.tensors[name].numbers()
        return found


def rotated(x: ov.Node, rotation: tuple[ov.Node, ov.Node]) -> ov.Node:
    """Heads [n, heads, size] whose halves are rotated. rotation: cosines and sines."""
    first, second = ops.split(x, integer(2), 2).outputs()
    turned = ops.concat([ops.multiply(second, floats([[[-1]]])), first], 2)
    return ops.add(ops.multiply(x, rotation[0]), ops.multiply(turned, rotation[1]))


def frequencies_of(theta: float, exponents: ArrayLike) -> NDArray[np.float32]:
    """Of a rotation, float32: 1 / thetaˣ."""
    powers: NDArray[np.float32] = np.power(np.float32(theta), np.asarray(exponents, np.float32))
    found: NDArray[np.float32] = np.reciprocal(powers)
    return found
