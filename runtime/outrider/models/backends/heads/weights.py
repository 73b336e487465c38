"""The weights of a drafter that is not a whole model, and the main model's that it shares.

They are in an IR of their own with one output for each weight, compressed as in any IR. The graph that uses them is
built at load, so that it fits this machine, and the main model's embedding is not stored twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.errors import BundleError
from outrider.models.backends.nodes import integer, ints
from outrider.models.backends.taps import after_layers, hidden_states_of, multiplied_by, output_matrix_of, read_ir

MATRIX, EMBEDDING = "lm_head", "embed_tokens"


class HeadWeights:
    """A drafter's weights by name, as nodes of a graph.

        weights = Weights.read(core, path, main_path)
        weights["fc.weight"]

    Numbers, such as "rms_norm_eps", are among them.
    """

    def __init__(self, found: dict[str, ov.Output], main: MainWeights | None) -> None:
        self._found, self._main = found, main

    @classmethod
    def read(cls, core: ov.Core, path: Path, main_path: Path | None) -> HeadWeights:
        """The weights in the file `path`, for the main model's IR at `main_path`; None if that is none.

        Raises:
            BundleError: when a file cannot be read.
        """
        model = read_ir(core, path)
        found = {name: each.get_node().input_value(0) for each in model.outputs for name in each.get_names()}
        return cls(found, MainWeights(core, main_path) if main_path else None)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> ov.Output:
        if name not in self._found:
            raise BundleError(f"The drafter has no weights {name!r}. Export the bundle again.")
        return self._found[name]

    def number(self, name: str) -> float:
        """A number among the weights."""
        return float(self[name].get_node().get_vector()[0])

    def width(self, name: str, axis: int) -> int:
        """The length of an axis."""
        return int(self[name].get_partial_shape()[axis].get_length())

    def embed(self, token_ids: ov.Node) -> ov.Node:
        """The embeddings of tokens int64 [n], float32 [n, 1, hidden]: the drafter's own, or the main model's."""
        if f"{EMBEDDING}.weight" in self:
            rows = ops.gather(self[f"{EMBEDDING}.weight"], token_ids, integer(0))
            return ops.unsqueeze(rows, ints(1))
        return self._shared.embed(token_ids)

    def logits(self, rows: ov.Node, name: str = MATRIX) -> ov.Node:
        """rows · the drafter's own output matrix, or the main model's, whole or cut."""
        for own in (f"{name}.weight", f"{MATRIX}.weight"):
            if own in self:
                return ops.matmul(rows, self[own], False, True)
        return self._shared.logits(rows)

    def table(self, name: str) -> Table:
        """A matrix whose rows are read here, outside the graph."""
        return Table(self[name])

    @property
    def _shared(self) -> MainWeights:
        if self._main is None:
            raise BundleError("The drafter needs the main model's embedding, which is not in OpenVINO's format.")
        return self._main


class Table:
    """A matrix of an IR, as `outrider_export.heads.container` writes it. Rows that are not read take no memory.

    table[[3, 5]]    # float32 [2, columns]
    """

    def __init__(self, matrix: ov.Output) -> None:
        self._node = matrix.get_node()  # its values are in the mapped file as long as it is there
        self._codes, *self._rounding = _constants_of(self._node)  # zero points and scales, [rows, 1], of int8

    def __len__(self) -> int:
        return len(self._codes)

    def __getitem__(self, rows: NDArray[np.int64] | list[int] | slice) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self._codes[rows].astype(np.float32)
        if self._rounding:
            zero_points, scales = self._rounding
            values = (values - zero_points[rows]) * scales[rows].astype(np.float32)
        return values


def _constants_of(node: ov.Node) -> list[NDArray[Any]]:
    if node.get_type_name() == "Constant":
        return [node.data]
    return [values for each in node.input_values() for values in _constants_of(each.get_node())]


class MainWeights:
    """The main model's embedding and output matrix, in the mapped file's memory, which both models share."""

    def __init__(self, core: ov.Core, path: Path) -> None:
        self._core, self._path = core, path

    def embed(self, token_ids: ov.Node) -> ov.Node:
        """The embeddings of tokens int64 [n], float32 [n, 1, hidden], scaled as the main model does."""
        model = read_ir(self._core, self._path)
        found = hidden_states_of(model)
        if not found:
            raise BundleError(f"{self._path}: the model's graph has no known form, so its embedding cannot be shared.")
        model.input("input_ids").replace(ops.unsqueeze(token_ids, ints(1)).output(0))
        return found[after_layers(0)].get_node()

    def logits(self, rows: ov.Node) -> ov.Node:
        """rows · the main model's output matrix."""
        matrix = output_matrix_of(read_ir(self._core, self._path))
        if matrix is None:
            raise BundleError(f"{self._path}: the model's logits are not made by a MatMul. Export the bundle again.")
        multiplied_by(matrix).replace(rows.output(0))
        return matrix
