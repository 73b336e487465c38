"""The graph of a decoder in ONNX, with the operators of ONNX Runtime that fuse attention and norms.

Inputs are input_ids, attention_mask (int64 [batch, tokens]) and the cache of each layer; outputs are logits float32
[batch, tokens, vocabulary] and the cache with the new tokens; see `outrider_export.onnx.graph`. GroupQueryAttention
rotates queries and keys, and writes the cache. The sum of a residual stream and its norm are one operator, by which
`heads.onnx_main` finds the hidden states.

Source: ContribOperators.md of ONNX Runtime 1.31.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.models.backends.projections import ATTENTION
from outrider_export.direct.decoder import Decoder, Layer
from outrider_export.direct.onnx_pack import OnnxMatrix, packed_name
from outrider_export.direct.own_codes import GROUP
from outrider_export.direct.pack import FileArray
from outrider_export.direct.rope import Rope
from outrider_export.direct.weights import EMBEDDING, FINAL_NORM, HEAD, Weights, layer_name
from outrider_export.onnx.files import import_onnx, point_to
from outrider_export.onnx.graph import FLOAT, INT64
from outrider_export.onnx.matrices import ZERO

_CONTRIB, _OPSET, _IR_VERSION = "com.microsoft", 22, 10
_CONTRIBUTED = ("FusedMatMul", "GroupQueryAttention", "MatMulNBits", "SkipSimplifiedLayerNormalization")
_INT32 = 6  # onnx.TensorProto's number for it
_ROUNDED = 4  # accuracy level: activations are rounded to 8 bits


def rotations(ropes: Mapping[str, Rope], context_length: int) -> dict[str, NDArray[np.float32]]:
    """Cosines and sines by the names of their constants, float32 [positions, n]."""
    made = {}
    positions = np.arange(context_length, dtype=np.float64)[:, None]
    for kind, rope in ropes.items():
        angles = positions * rope.frequencies.astype(np.float64)
        for name, values in (("cos_cache", np.cos(angles)), ("sin_cache", np.sin(angles))):
            made[_of_kind(name, kind, ropes)] = (values * rope.scale).astype(np.float32)
    return made


def _of_kind(name: str, kind: str, ropes: Mapping[str, Rope]) -> str:
    return name if len(ropes) == 1 else f"{name}.{kind}"


def build(decoder: Decoder, weights: Weights, packed: Mapping[str, OnnxMatrix], others: Mapping[str, FileArray]) -> Any:
    """The graph, an `onnx.ModelProto`, whose matrices are in the file of weights.

    others: arrays that are there, too: those of `rotations`.
    """
    return _Builder(decoder, weights, packed, others).model()


class _Builder:
    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        packed: Mapping[str, OnnxMatrix],
        others: Mapping[str, FileArray],
    ) -> None:
        self.decoder, self.weights, self.packed = decoder, weights, packed
        self.onnx = import_onnx()
        self.nodes: list[Any] = []
        self.tensors: dict[str, Any] = {}
        self.widened: set[str] = set()
        for name, array in others.items():
            self._stored(name, array)
        for name, matrix in packed.items():
            for end, array in matrix.arrays.items():
                self._stored(f"{name}.{end}", array)

    def model(self) -> Any:
        decoder, helper = self.decoder, self.onnx.helper
        lengths = self._lengths()
        stream = self._scaled("embedding_scale", self._embedding(), decoder.scales.embedding)
        norms = decoder.arch.norms
        firsts = [layer_name(i, norms.before_attention) for i in range(len(decoder.layers))] + [FINAL_NORM]
        read = self._norm(firsts[0], stream)
        for i, layer in enumerate(decoder.layers):
            attended = self._norm(layer_name(i, norms.after_attention), self._attention(i, layer, read, lengths))
            stream, read = self._added(stream, attended, layer_name(i, norms.before_mlp))
            fed = self._norm(layer_name(i, norms.after_mlp), self._feed_forward(i, read))
            stream, read = self._added(stream, fed, firsts[i + 1])
        self._logits(read)
        caches = [f"{i}.{half}" for i in range(len(decoder.layers)) for half in ("key", "value")]
        heads, size, width = decoder.sizes.num_kv_heads, decoder.sizes.head_size, self.packed[self._head].shape[0]

        def port(name: str, kind: int, *shape: int | str) -> Any:
            return helper.make_tensor_value_info(name, kind, shape)

        inputs = [
            port("input_ids", INT64, "batch_size", "sequence_length"),
            port("attention_mask", INT64, "batch_size", "total_sequence_length"),
            *(port(f"past_key_values.{each}", FLOAT, "batch_size", heads, "past_length", size) for each in caches),
        ]
        outputs = [
            port("logits", FLOAT, "batch_size", "sequence_length", width),
            *(port(f"present.{each}", FLOAT, "batch_size", heads, "total_sequence_length", size) for each in caches),
        ]
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, list(self.tensors.values()))
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)

    def _lengths(self) -> tuple[str, str]:
        """The last position of each sequence, int32 [batch], and the longest sequence's number of tokens, int32."""
        axis, one = self._ints("axis_1", [1]), self._constant("one", np.int64(1))
        counts = self._node("ReduceSum", "lengths", "attention_mask", axis, keepdims=0)
        last = self._node("Sub", "lengths/last", counts, one)
        total = self._node("Gather", "total", self._node("Shape", "total/shape", "attention_mask"), one)
        return self._node("Cast", "lengths/int32", last, to=_INT32), self._node("Cast", "total/int32", total, to=_INT32)

    def _embedding(self) -> str:
        matrix, ids = self.packed[EMBEDDING], "input_ids"
        codes = self._node("Gather", f"{EMBEDDING}/codes", f"{EMBEDDING}.weight", ids)
        if not matrix.bits:
            return codes
        if matrix.bits == 4:
            return self._embedding_in_4_bits(matrix, codes)
        values = self._node("Cast", f"{EMBEDDING}/float", codes, to=FLOAT)
        values = self._node("Sub", f"{EMBEDDING}/centred", values, self._constant("middle", np.float32(ZERO)))
        scales = self._node("Gather", f"{EMBEDDING}/scales", f"{EMBEDDING}.scales", ids)
        last = self._ints("axis_last", [-1])
        values = self._node(
            "Mul", f"{EMBEDDING}/blocks", values, self._node("Unsqueeze", f"{EMBEDDING}/scale", scales, last)
        )
        columns = matrix.shape[1]
        whole = math.ceil(columns / matrix.block) * matrix.block
        rows = self._node("Reshape", f"{EMBEDDING}/rows", values, self._ints("embedding_shape", [0, 0, whole]))
        if whole == columns:
            return rows
        ends = self._ints("embedding_begin", [0]), self._ints("embedding_end", [columns])
        return self._node("Slice", f"{EMBEDDING}/cut", rows, *ends, last)

    def _embedding_in_4_bits(self, matrix: OnnxMatrix, pairs: str) -> str:
        """Rows of an embedding. pairs: its codes, two a byte, uint8 [batch, tokens, blocks, bytes]."""
        last = self._ints("axis_last", [-1])
        low = self._node("BitwiseAnd", f"{EMBEDDING}/low", pairs, self._constant("low_bits", np.uint8(15)))
        high = self._constant("four", np.uint8(4))
        high = self._node("BitShift", f"{EMBEDDING}/high", pairs, high, direction="RIGHT")
        halves = [self._node("Unsqueeze", f"{each}/half", each, last) for each in (low, high)]
        codes = self._node("Concat", f"{EMBEDDING}/pairs", *halves, axis=-1)
        whole = self._ints("embedding_blocks", [0, 0, matrix.shape[1] // matrix.block, matrix.block])
        values = self._node(
            "Cast", f"{EMBEDDING}/float", self._node("Reshape", f"{EMBEDDING}/each", codes, whole), to=FLOAT
        )
        for op, end in (("Mul", "scales"), ("Add", "minima")):
            found = self._node("Gather", f"{EMBEDDING}/{end}", f"{EMBEDDING}.{end}", "input_ids")
            found = self._node("Cast", f"{EMBEDDING}/{end}/float", found, to=FLOAT)
            found = self._node("Unsqueeze", f"{EMBEDDING}/{end}/each", found, last)
            values = self._node(op, f"{EMBEDDING}/{op}", values, found)
        return self._node(
            "Reshape", f"{EMBEDDING}/rows", values, self._ints("embedding_shape", [0, 0, matrix.shape[1]])
        )

    def _attention(self, i: int, layer: Layer, x: str, lengths: tuple[str, str]) -> str:
        decoder = self.decoder
        heads, kv_heads = decoder.num_heads, decoder.sizes.num_kv_heads
        if packed_name(i) in self.packed:
            rows = [self._product(packed_name(i), x, self._bias_of_packed(i)), "", ""]
        else:
            rows = [self._project(i, part, x) for part in ATTENTION[:3]]
            rows[:2] = self._normed(i, "q", rows[0], heads), self._normed(i, "k", rows[1], kv_heads)
        caches = [f"{kind}.{i}.{half}" for kind in ("past_key_values", "present") for half in ("key", "value")]
        rotation: list[str] = []
        if layer.rope is not None:
            rotation = [_of_kind(name, layer.rope, decoder.ropes) for name in ("cos_cache", "sin_cache")]
        found = self._node(
            "GroupQueryAttention",
            layer_name(i, "self_attn"),
            *rows,
            *caches[:2],
            *lengths,
            *rotation,
            more=caches[2:],
            num_heads=heads,
            kv_num_heads=kv_heads,
            scale=decoder.scales.attention,
            do_rotary=int(bool(rotation)),
        )
        return self._project(i, "self_attn.o_proj", found)

    def _bias_of_packed(self, i: int) -> NDArray[np.float32] | None:
        """The biases of queries, keys and values; zeros for those that have none; None if no one has any."""
        heads = self.decoder.num_heads, self.decoder.sizes.num_kv_heads, self.decoder.sizes.num_kv_heads
        found = [self.weights.vector(f"{layer_name(i, part)}.bias") for part in ATTENTION[:3]]
        if all(each is None for each in found):
            return None
        zeros = [np.zeros(count * self.decoder.sizes.head_size, np.float32) for count in heads]
        return np.concatenate([none if each is None else each for each, none in zip(found, zeros, strict=True)])

    def _normed(self, i: int, kind: str, x: str, num_heads: int) -> str:
        """Queries or keys [batch, tokens, width] after their norm, if they have one: of each head, or of all."""
        name, size = layer_name(i, f"self_attn.{kind}_norm"), self.decoder.sizes.head_size
        weight = self.weights.vector(f"{name}.weight")
        if weight is None or len(weight) != size:
            return x if weight is None else self._norm(name, x)
        each = self._node("Reshape", f"{name}/heads", x, self._ints(f"{kind}_heads", [0, 0, num_heads, size]))
        whole = self._ints(f"{kind}_width", [0, 0, num_heads * size])
        return self._node("Reshape", f"{name}/whole", self._norm(name, each), whole)

    def _feed_forward(self, i: int, x: str) -> str:
        gate, name = self._project(i, "mlp.gate_proj", x), layer_name(i, "mlp")
        if self.decoder.activation == "silu":
            gate = self._node("Mul", f"{name}/silu", gate, self._node("Sigmoid", f"{name}/sigmoid", gate))
        else:
            approximate = "tanh" if self.decoder.activation == "gelu_tanh" else "none"
            gate = self._node("Gelu", f"{name}/gelu", gate, approximate=approximate)
        wide = self._node("Mul", f"{name}/wide", gate, self._project(i, "mlp.up_proj", x))
        return self._project(i, "mlp.down_proj", wide)

    def _added(self, stream: str, x: str, norm: str) -> tuple[str, str]:
        """The residual stream with x added, and what the next part reads of it, after a norm."""
        total = f"{x}/sum"
        x = self._scaled(f"{x}/scaled", x, self.decoder.scales.residual)
        if norm.endswith(".") or self.decoder.arch.norms.kind != "rms":
            return self._node("Add", total, stream, x), self._norm(norm, total)
        read = self._node(
            "SkipSimplifiedLayerNormalization",
            norm,
            stream,
            x,
            self._vector(f"{norm}.weight"),
            more=["", "", total],
            epsilon=self.decoder.eps,
        )
        return total, read

    def _norm(self, name: str, x: str) -> str:
        """A norm of the last axis; x itself where the architecture has none of this name."""
        if name.endswith("."):
            return x
        options: dict[str, Any] = {"axis": -1, "epsilon": self.decoder.eps, "stash_type": 1}
        if self.decoder.arch.norms.kind == "rms":
            return self._node("SimplifiedLayerNormalization", name, x, self._vector(f"{name}.weight"), **options)
        weight, bias = (self.weights.vector(f"{name}.{kind}") for kind in ("weight", "bias"))
        weight = np.ones(self.decoder.hidden_size, np.float32) if weight is None else weight
        inputs = [self._constant(f"{name}.weight", weight)]
        inputs += [] if bias is None else [self._constant(f"{name}.bias", bias)]
        return self._node("LayerNormalization", name, x, *inputs, **options)

    def _logits(self, x: str) -> None:
        decoder = self.decoder
        found = self._product(self._head, x, self.weights.vector(f"{HEAD}.bias"))
        found = self._scaled("logit_scale", found, decoder.scales.logits)
        if decoder.scales.logit_cap:
            found = self._node("Tanh", "logit_tanh", self._scaled("logit_share", found, 1 / decoder.scales.logit_cap))
            found = self._scaled("logit_cap", found, decoder.scales.logit_cap)
        self.nodes[-1].output[0] = "logits"

    @property
    def _head(self) -> str:
        """The name of the output matrix."""
        return HEAD if HEAD in self.packed else EMBEDDING

    def _project(self, i: int, part: str, x: str) -> str:
        name = layer_name(i, part)
        return self._product(name, x, self.weights.vector(f"{name}.bias"))

    def _product(self, name: str, x: str, bias: NDArray[np.float32] | None) -> str:
        """The product with a matrix, and its bias."""
        matrix, inputs = self.packed[name], [f"{name}.{end}" for end in self.packed[name].arrays]
        if matrix.bits:
            rows, columns = matrix.shape
            if matrix.sums:
                x, columns = self._with_sums(x, columns), columns + columns // matrix.block
            sizes: dict[str, Any] = {"N": rows, "K": columns, "bits": matrix.bits, "block_size": matrix.block}
            found = self._node("MatMulNBits", f"{name}/product", x, *inputs, accuracy_level=_ROUNDED, **sizes)
        elif matrix.is_by_rows:
            found = self._node("FusedMatMul", f"{name}/product", x, *inputs, transB=1)
        else:
            found = self._node("MatMul", f"{name}/product", x, *inputs)
        if bias is None:
            return found
        return self._node("Add", f"{name}/biased", found, self._constant(f"{name}.bias", bias))

    def _with_sums(self, x: str, columns: int) -> str:
        """x [batch, tokens, columns] with the sums of its blocks appended, for leftovers; see `own_codes`."""
        name = f"{x}/with_sums"
        if name not in self.widened:
            shape = self._ints(f"blocks_of_{columns}", [0, 0, columns // GROUP, GROUP])
            blocks = self._node("Reshape", f"{x}/blocks", x, shape)
            sums = self._node("ReduceSum", f"{x}/sums", blocks, self._ints("axis_last", [-1]), keepdims=0)
            self.widened.add(self._node("Concat", name, x, sums, axis=-1))
        return name

    def _scaled(self, name: str, x: str, factor: float) -> str:
        return x if factor == 1 else self._node("Mul", name, x, self._constant(f"{name}.factor", np.float32(factor)))

    def _vector(self, name: str) -> str:
        """A norm's weights."""
        values = self.weights.vector(name)
        if values is None:
            raise self.weights.missing(name)
        return self._constant(name, values)

    def _node(self, op: str, name: str, *inputs: str, more: Sequence[str] = (), **attributes: Any) -> str:
        """Add a node. more: its outputs after the first. Returns the first."""
        domain = _CONTRIB if op in _CONTRIBUTED else ""
        node = self.onnx.helper.make_node(op, inputs, [name, *more], name=name, domain=domain, **attributes)
        self.nodes.append(node)
        return name

    def _ints(self, name: str, values: list[int]) -> str:
        return self._constant(name, np.array(values, dtype=np.int64))

    def _constant(self, name: str, values: ArrayLike) -> str:
        """A constant inside the graph."""
        self.tensors[name] = self.onnx.numpy_helper.from_array(np.asarray(values), name)
        return name

    def _stored(self, name: str, array: FileArray) -> None:
        """A constant in the file of weights."""
        values = array.numbers
        kind = self.onnx.helper.np_dtype_to_tensor_dtype(values.dtype)
        tensor = self.onnx.TensorProto(name=name, data_type=kind, dims=values.shape)
        point_to(tensor, array.offset, values.nbytes)
        self.tensors[name] = tensor
