"""A decoder's weights from its graph in ONNX, as `main_model.MainGraph` reads them from one of OpenVINO's.

Products are run on unit vectors, so that weights are what the kernels make of their codes. Names are those that
`outrider export` gives (`direct.onnx_graph`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.manifest import Geometry
from outrider.errors import ExportError
from outrider.models.backends.projections import ATTENTION, NAMES
from outrider_export.direct.onnx_pack import packed_name
from outrider_export.direct.weights import FINAL_NORM, layer_name
from outrider_export.heads.onnx_main import embedding_of, output_matrix_of, part_of
from outrider_export.onnx.files import OnnxWeights, load

_NORMS = ("input_layernorm", "post_attention_layernorm")
_WITH_SUMS = "/with_sums"  # the end of the name of a product's input that has sums of its blocks
Array = NDArray[np.float32]


class OnnxGraph:
    """A decoder's graph. path: its file.

    Raises:
        ExportError: when it is not in the form that `outrider export` writes.
    """

    def __init__(self, path: Path, geometry: Geometry) -> None:
        self._weights, self._geometry = OnnxWeights(load(path), path.parent), geometry
        self._nodes = {node.name: node for node in self._weights.model.graph.node}
        last = geometry.num_layers - 1
        if not {FINAL_NORM, *(f"{layer_name(last, name)}/product" for name in NAMES[3:])} <= {*self._nodes}:
            raise ExportError(
                f"{path} has other names than 'outrider export' gives, so no drafter can be trained for its hidden "
                "states. Export the model from its checkpoint: outrider export MODEL."
            )

    def layer(self, index: int) -> dict[str, Array]:
        """A layer's weights by the names of Llama's checkpoints, and the biases of its products."""
        shape = self._geometry
        heads = [shape.num_heads * shape.head_size, *[shape.num_kv_heads * shape.head_size] * 2]
        weights = {f"{norm}.weight": self._weights.read(layer_name(index, f"{norm}.weight")).copy() for norm in _NORMS}
        sizes = {ATTENTION[3]: shape.attended_size}
        for name in NAMES:
            if self._product(layer_name(index, name)):
                width = sizes.get(name, shape.hidden_size)
                weights |= self._matrix(layer_name(index, name), width, {name: slice(None)})
                sizes["mlp.down_proj"] = len(weights[f"{name}.weight"])  # that of the product before it
        if self._product(packed_name(index)):
            ends = np.cumsum([0, *heads]).tolist()
            rows = {name: slice(*ends[i : i + 2]) for i, name in enumerate(ATTENTION[:3])}
            weights |= self._matrix(packed_name(index), shape.hidden_size, rows)
        return weights

    starting_layer = layer

    def mlp_width(self, index: int, _: int) -> int:
        """Numbers of a token between the products of a layer's feed-forward part."""
        return len(self.layer(index)["mlp.gate_proj.weight"])

    def embedding(self, count: int) -> Array:
        """The embeddings of so many tokens, [count, h]."""
        return embedding_of(self._weights, count, self._geometry.hidden_size)

    def head(self) -> Array:
        """The output matrix, [logits width, h]."""
        return output_matrix_of(self._weights, None)

    def final_norm(self) -> Array:
        """The weights [h] of the norm before the output matrix."""
        return self._weights.read(f"{FINAL_NORM}.weight").copy()

    def epsilon(self) -> float:
        """What norms add to the mean of squares."""
        return next(float(f"{each.f:.6g}") for each in self._nodes[FINAL_NORM].attribute if each.name == "epsilon")

    def rope_theta(self, head_size: int) -> float:
        """The base of rotary embeddings, from the angles of position 1."""
        half = head_size // 2
        angles = np.arcsin(self._weights.read("sin_cache")[1].astype(np.float64))
        return float(f"{(angles[0] / angles[-1]) ** (half / (half - 1)):.4g}")

    def _product(self, name: str) -> bool:
        return f"{name}/product" in self._nodes

    def _matrix(self, product: str, width: int, rows: dict[str, slice]) -> dict[str, Array]:
        """The matrix of a product, [out, width] in these rows, and its biases."""
        node = self._nodes[f"{product}/product"]
        read = node.input[0].removesuffix(_WITH_SUMS)
        part = part_of(self._weights, [read], node.output[0])
        found: Array = part.run(None, {read: np.eye(width, dtype=np.float32)[None]})[0][0].T
        made = {f"{name}.weight": found[place].copy() for name, place in rows.items()}
        if (bias := f"{product}.bias") in self._weights:
            made |= {f"{name}.bias": self._weights.read(bias)[place].copy() for name, place in rows.items()}
        return made
