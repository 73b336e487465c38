"""The main model as training needs it, read from a bundle's graph: a drafter learns for the weights that will run.

    teacher = read_teacher(read_bundle("my-bundle"))

Weights are found by what the graph does with them, as names differ with the program that wrote it. Compressed ones are
unpacked to float32. Heads need only the ends of the model: embedding, output matrix, final norm, and its last layers
with attention, which is what heads have, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.bundle import Bundle
from outrider.bundle.manifest import ModelEntry
from outrider.errors import BundleError, ExportError
from outrider.models.backends.heads.weights import MainWeights
from outrider.models.backends.projections import Projection, backwards, projections_of
from outrider.models.backends.taps import LAST, hidden_states_of, multiplied_by, output_matrix_of, read_ir
from outrider.system.core import new_core
from outrider_distill.onnx_main import OnnxGraph
from outrider_distill.train.layers import NUM_LAYERS, Shape, Teacher

_MATRIX_AXES = 2  # axes; the matrices of all experts have one more
_ROWS = 4096  # embeddings that one call reads
_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
_SMALLEST = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}  # where a graph does not show them


def read_teacher(bundle: Bundle, model: ModelEntry | None = None) -> Teacher:
    """What heads need of a bundle's main model, or of another model of it.

    Raises:
        ExportError: when its graph has no known form.
    """
    main = model or bundle.manifest.main
    geometry, graph = main.geometry, _graph_of(bundle, main)
    kinds = geometry.layer_states or ("",) * geometry.num_layers
    attending = [i for i, kind in enumerate(kinds) if not kind]
    # Where there are fewer, the first one stands twice.
    layers = [graph.starting_layer(i) for i in (attending[:1] * NUM_LAYERS + attending)[-NUM_LAYERS:]]
    shape = Shape(
        hidden_size=geometry.hidden_size,
        intermediate_size=graph.mlp_width(attending[-1], geometry.num_active_experts),
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_size=geometry.head_size,
        vocab_size=max(geometry.logits_width, main.vocab_size),  # the former is less where it was cut
        num_layers=geometry.num_layers,
        context_length=geometry.context_length,
        norm_epsilon=graph.epsilon(),
        rope_theta=graph.rope_theta(geometry.head_size),
    )
    return Teacher(
        shape,
        torch.from_numpy(graph.embedding(shape.vocab_size)),
        torch.from_numpy(graph.head()),
        torch.from_numpy(graph.final_norm()),
        [{name: torch.from_numpy(each) for name, each in layer.items()} for layer in layers],
        main.vocab_size,
    )


def read_layers(bundle: Bundle, model: ModelEntry | None = None) -> Iterator[dict[str, Any]]:
    """The weights of all layers of such a model, one by one, as `Teacher.layers` has the last ones.

    Raises:
        ExportError: as `read_teacher`.
    """
    model = model or bundle.manifest.main
    graph = _graph_of(bundle, model)
    for index in range(model.geometry.num_layers):
        yield {name: torch.from_numpy(each) for name, each in graph.layer(index).items()}


def _graph_of(bundle: Bundle, model: ModelEntry) -> MainGraph | OnnxGraph:
    """The graph of one of a bundle's models."""
    if model.format == "onnx":
        return OnnxGraph(bundle.model_path(model), model.geometry)
    path, shape = bundle.model_path(model), model.geometry
    return MainGraph(read_ir(new_core(), path), path, shape.num_layers, shape.num_heads, shape.head_size)


class MainGraph:
    """A decoder's graph, and where its weights are. path: its file. num_heads, head_size: of queries."""

    def __init__(self, model: ov.Model, path: Path, num_layers: int, num_heads: int, head_size: int) -> None:
        self._model, self._path, self._num_layers = model, path, num_layers
        self._num_heads, self._attended = num_heads, num_heads * head_size
        self._layers: dict[int, dict[str, Projection]] = {}  # those that were asked for
        self._states = hidden_states_of(model, num_layers)
        matrix = output_matrix_of(model)
        if not self._states or matrix is None:
            raise ExportError(
                "The main model's graph is no chain of residual additions as in Llama or Qwen, so no drafter can be "
                "trained for its hidden states. Train a draft model: --kind draft --from DRAFT."
            )
        self.output_matrix: ov.Node = matrix

    def embedding(self, count: int) -> NDArray[np.float32]:
        """The embeddings of so many tokens, float32 [count, h], as the first layer gets them."""
        token_ids = ops.parameter([-1], np.int64)
        rows = MainWeights(new_core(), self._path).embed(token_ids)
        compiled = new_core().compile_model(ov.Model([ops.result(rows)], [token_ids]), "CPU", _EXACT)
        pieces = np.array_split(np.arange(count), -(-count // _ROWS))
        return np.concatenate([compiled([each])[0].reshape(len(each), -1).copy() for each in pieces])

    def head(self) -> NDArray[np.float32]:
        """The output matrix, float32 [logits width, h]."""
        return _unpacked([self.output_matrix])[0]

    def final_norm(self) -> NDArray[np.float32]:
        """The weights float32 [h] of the norm before the output matrix."""
        return self.norm_before(self.output_matrix)

    def layer(self, index: int) -> dict[str, NDArray[np.float32]]:
        """A decoder layer's weights by the names of Llama's checkpoints, and the biases of its products."""
        named = self._products(index)
        norms = {"input_layernorm": "self_attn.q_proj", "post_attention_layernorm": "mlp.gate_proj"}
        nodes = {found.node.get_name(): found.node for found in named.values()}  # one may be of several products
        matrices = dict(zip(nodes, _unpacked([*nodes.values()]), strict=True))
        rows = {name: slice(found.begin, found.begin + found.num_out) for name, found in named.items()}
        weights = {
            f"{name}.weight": matrices[found.node.get_name()][..., rows[name], :] for name, found in named.items()
        }
        biases = {f"{name}.bias": _bias_after(found) for name, found in named.items()}
        weights |= {name: bias for name, bias in biases.items() if bias is not None}
        return weights | {f"{norm}.weight": self.norm_before(named[name].node) for norm, name in norms.items()}

    def starting_layer(self, index: int) -> dict[str, NDArray[np.float32]]:
        """What of a layer with attention a head can start from, as `layer` has it.

        Gates of attention are left out (Qwen3.5: their rows follow those of each head's queries), and experts.
        """
        found = {name: weight for name, weight in self.layer(index).items() if weight.ndim <= _MATRIX_AXES}
        for kind in ("weight", "bias"):
            queries = found.get(name := f"self_attn.q_proj.{kind}")
            if queries is not None and len(queries) == 2 * self._attended:
                by_head = queries.reshape(self._num_heads, 2, -1, *queries.shape[1:])
                found[name] = by_head[:, 0].reshape(self._attended, *queries.shape[1:]).copy()
        return found

    def mlp_width(self, index: int, num_active: int) -> int:
        """Numbers of a token between the products of a layer's feed-forward part. num_active: of its experts."""
        gate = self._products(index)["mlp.gate_proj"]
        is_dense = len(gate.node.input_value(1).get_partial_shape()) == _MATRIX_AXES
        return gate.num_out * (1 if is_dense else max(num_active, 1))

    def _products(self, index: int) -> dict[str, Projection]:
        if index not in self._layers:
            try:
                (self._layers[index],) = projections_of(
                    self._model, self._num_layers, attended=self._attended, layers=(index,)
                )
            except BundleError as error:
                raise ExportError(f"{error} Train a draft model: --kind draft --from DRAFT.") from error
        return self._layers[index]

    def norm_before(self, product: ov.Node) -> NDArray[np.float32]:
        """The weights float32 [h] of the norm whose output a product reads. Graphs lack those that are all 1."""
        node = multiplied_by(product).get_node()
        while node.get_type_name() in ("Reshape", "Tile"):  # rows for each expert
            node = node.input_value(0).get_node()
        factors = list(node.input_values()) if node.get_type_name() == "Multiply" else []
        for value in factors:
            if (found := _constant(value)) is not None and found.size > 1:
                return found.reshape(-1)
        if any(_width(value) == 1 for value in factors):  # one over the root of the mean of squares
            return np.ones(max(map(_width, factors)), dtype=np.float32)
        raise ExportError(
            "The main model's graph has no RMS norm before its products, as Llama and Qwen have it. Train a draft "
            "model: --kind draft --from DRAFT."
        )

    def epsilon(self) -> float:
        """What the final norm adds to the mean of squares."""
        for node in backwards(self._states[LAST]):
            if node.get_type_name() == "Add":
                found = next((c for c in map(_constant, node.input_values()) if c is not None and c.size == 1), None)
                if found is not None:
                    return _short(found.reshape(-1)[0])
        return _SMALLEST["rms_norm_eps"]

    def rope_theta(self, head_size: int) -> float:
        """The base of rotary embeddings: frequency i is theta ** (-i / half). Scaled ones are met at both ends."""
        half = head_size // 2
        turned = next((node for node in self._model.get_ordered_ops() if node.get_type_name() == "Cos"), None)
        for node in () if turned is None else backwards(turned.output(0)):
            if node.get_type_name() == "Constant" and np.prod(node.get_output_shape(0)) == half:
                found = node.get_data().astype(np.float64).reshape(-1)
                return _short((found[0] / found[-1]) ** (half / (half - 1)))
        return _SMALLEST["rope_theta"]


def _unpacked(products: list[ov.Node]) -> list[NDArray[np.float32]]:
    """The matrices of products, float32 [out, in] each."""
    matrices = [ops.result(ops.convert(each.input_value(1), np.float32)) for each in products]
    found = new_core().compile_model(ov.Model(matrices, []), "CPU", _EXACT)({})
    both = zip(found.to_tuple(), products, strict=True)
    return [matrix.copy() if node.get_attributes()["transpose_b"] else matrix.T.copy() for matrix, node in both]


def _bias_after(product: Projection) -> NDArray[np.float32] | None:
    """The numbers float32 [num_out] that are added to a product; None if there are none."""
    for target in product.node.output(0).get_target_inputs():
        if (node := target.get_node()).get_type_name() == "Add":
            for found in map(_constant, node.input_values()):
                if found is not None and found.size == _width(product.node.output(0)):
                    return found.reshape(-1)[product.begin : product.begin + product.num_out]
    return None


def _width(value: ov.Output) -> int:
    """The length of a value's rows; 0 if that is not known."""
    last = value.get_partial_shape()[-1]
    return int(last.get_length()) if last.is_static else 0


def _short(number: Any) -> float:
    """A number that was stored in single precision, as it was written."""
    return float(f"{number:.6g}")


def _constant(value: ov.Output) -> NDArray[np.float32] | None:
    """A constant's numbers, past a conversion; None for what depends on the input."""
    node = value.get_node()
    if node.get_type_name() == "Convert":
        return _constant(node.input_value(0))
    if node.get_type_name() != "Constant":
        return None
    found: NDArray[np.float32] = node.get_data().astype(np.float32)
    return found
