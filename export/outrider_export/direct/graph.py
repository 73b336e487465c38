"""Writes a decoder's graph: stateful, in the form that optimum-intel gives it.

Inputs are input_ids, attention_mask, position_ids (int64 [batch, tokens]) and beam_idx (int32 [batch]); the output is
logits float32 [batch, tokens, vocabulary]. Keys and values are states. OpenVINO's passes find attention, rotation,
norms and sliding windows by their form, so it is kept to: see `paged_attention_transformation`. openvino-genai finds
the embedding and the residual stream by their names.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import util
from openvino.utils.node_factory import NodeFactory

from outrider.models.backends.nodes import END, floats, integer, ints, parameter, result, transposed
from outrider_export.direct.altup import AltUp
from outrider_export.direct.decoder import OUTPUT_GATE, Decoder, Layer, QueryGrowth
from outrider_export.direct.feed_forward import FeedForward
from outrider_export.direct.latent import EPS, K_B, KV_A, KV_NORM, Q_A, Q_B, Q_NORM, V_B, Latent, Q
from outrider_export.direct.layer_inputs import all_inputs, input_of
from outrider_export.direct.nodes import Masks, angles_of, rank_of, rms_norm, unsqueezed
from outrider_export.direct.own_codes import GROUP
from outrider_export.direct.pack import PackedMatrix
from outrider_export.direct.recurrences import States
from outrider_export.direct.recurrent_layers import Parts, split, state_layer
from outrider_export.direct.rope import Rope
from outrider_export.direct.save import Stored, share_constants
from outrider_export.direct.sizes import LayerSizes
from outrider_export.direct.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER_EMBEDDING,
    LAYER_GATE,
    LAYER_INPUTS,
    LAYER_PROJECTION,
    Weights,
    layer_name,
)


def build(decoder: Decoder, weights: Weights, packed: Mapping[str, PackedMatrix]) -> tuple[ov.Model, list[Stored]]:
    """The graph of a decoder, with inputs instead of the constants of `packed`, which `save` replaces."""
    builder = _Builder(decoder, weights, packed)
    return builder.model(), builder.stored


class _Builder:
    def __init__(self, decoder: Decoder, weights: Weights, packed: Mapping[str, PackedMatrix]) -> None:
        self.decoder, self.weights, self.packed = decoder, weights, packed
        self.input_ids, self.attention_mask, self.position_ids = (
            parameter(name, ov.Type.i64, (-1, -1)) for name in ("input_ids", "attention_mask", "position_ids")
        )
        self.beam_idx = parameter("beam_idx", ov.Type.i32, (-1,))
        self.batch = ops.gather(ops.shape_of(self.input_ids, "i64"), ints(0), integer(0))
        self.masks = Masks(self.input_ids, self.attention_mask)
        self.rotations = {kind: self._rotation(rope) for kind, rope in decoder.ropes.items()}
        self.growth = None if decoder.query_growth is None else self._growth(decoder.query_growth)
        self.sinks: list[ov.Node] = []
        self.states = States(self.batch, self.beam_idx, self.sinks)
        self.stored: list[Stored] = []
        self.caches: dict[int, list[ov.Node]] = {}  # keys and values of each layer that has its own
        self.parts: dict[str, ov.Output] = {}  # products with matrices that are one with others
        self.widened: dict[str, ov.Node] = {}  # what is multiplied, with sums, by its name without
        self.inputs: ov.Node | None = None  # of all layers, where each has its own
        self.feed_forward = FeedForward(decoder, weights, self._project, self._matrix, self._norm)
        streams = decoder.streams
        self.altup = None if streams is None else AltUp(decoder, streams, weights, self._project, self._product)

    def model(self) -> ov.Model:
        decoder = self.decoder
        embedding = self._matrix(EMBEDDING)
        stream = ops.gather(embedding, ops.convert(self.input_ids, "i32"), ops.constant(np.int32(0)))
        stream.set_friendly_name(f"__module.{EMBEDDING}/aten::embedding/Gather")
        if decoder.arch.embedding == "normed":
            stream = rms_norm(stream, None, decoder.eps)
        stream = _scaled(stream, decoder.scales.embedding)
        if (own := decoder.layer_embedding) is not None:
            found = ops.matmul(stream, self._matrix(LAYER_INPUTS), False, True)
            self.inputs = all_inputs(decoder, own, self.weights, self.input_ids, self._matrix(LAYER_EMBEDDING), found)
        stream = stream if self.altup is None else self.altup.begun(stream)
        for i, layer in enumerate(decoder.layers):
            stream = self._layer(i, layer, stream)
        stream = stream if self.altup is None else self.altup.ended(stream)
        last = self._norm(FINAL_NORM, stream)
        matrix = self._matrix(HEAD) if HEAD in self.packed else embedding
        logits = _scaled(self._biased(HEAD, ops.matmul(last, matrix, False, True)), decoder.scales.logits)
        if decoder.scales.logit_cap:
            logits = _scaled(ops.tanh(_scaled(logits, 1 / decoder.scales.logit_cap)), decoder.scales.logit_cap)
        inputs = [self.input_ids, self.attention_mask, self.position_ids, self.beam_idx]
        model = ov.Model(
            [result("logits", logits)], self.sinks, [*inputs, *(node for node, _ in self.stored)], "decoder"
        )
        share_constants(model)
        return model

    def _layer(self, i: int, layer: Layer, stream: ov.Node) -> ov.Node:
        if self.altup is not None:
            predicted = self.altup.predicted(i, stream)
            every = self.altup.corrected(i, predicted, self._computed(i, layer, self.altup.active(predicted)))
            return self.altup.added(every, self._own_input(i, self.altup.scaled(i, every)))
        stream = self._computed(i, layer, stream)
        if self.inputs is not None:
            stream = ops.add(stream, self._own_input(i, stream))
        factor = self.weights.numbers_if_any(layer_name(i, "output_scale.weight"), 1)
        return stream if factor is None else ops.multiply(stream, floats(factor.reshape(1, 1, 1)))

    def _computed(self, i: int, layer: Layer, stream: ov.Node) -> ov.Node:
        """The residual stream after attention, or a state, and the feed-forward part."""
        norms, scale = self.decoder.arch.norms, self.decoder.scales.residual
        read = self._norm(layer_name(i, norms.before_attention), stream)
        attended = self._norm(layer_name(i, norms.after_attention), self._mixed(i, layer, read), self.decoder.after_eps)
        if self.decoder.arch.layers == "parallel":
            return ops.add(ops.add(stream, attended), self.feed_forward.of(i, layer, read, stream))
        stream = ops.add(stream, _scaled(attended, scale))
        stream.set_friendly_name(f"__module.model.layers.{i}/aten::add/Add")
        if self.altup is not None:
            stream = self.altup.with_laurel(i, stream, read)
        if not layer.feeds:
            return stream
        read = self._norm(layer_name(i, norms.before_mlp), stream)
        fed = self.feed_forward.of(i, layer, read, stream)
        fed = self._norm(layer_name(i, norms.after_mlp), fed, self.decoder.after_eps)
        stream = ops.add(stream, _scaled(fed, scale))
        stream.set_friendly_name(f"__module.model.layers.{i}/aten::add/Add_1")
        return stream

    def _own_input(self, i: int, stream: ov.Node) -> ov.Node:
        """What layer i makes of its own embeddings of the tokens."""
        if self.inputs is None:
            raise AssertionError("the decoder has no embeddings by layer")
        gate = self.feed_forward.activated(self._project(i, LAYER_GATE, stream))
        read = ops.multiply(gate, input_of(i, self.inputs))
        return self._norm(layer_name(i, "post_per_layer_input_norm"), self._project(i, LAYER_PROJECTION, read))

    def _mixed(self, i: int, layer: Layer, x: ov.Node) -> ov.Node:
        """What a layer reads of earlier tokens, by attention or from its state."""
        if layer.state is None:
            return self._attention(i, layer, x)
        return state_layer(layer.state, self._parts(i), x)

    def _parts(self, i: int) -> Parts:
        return Parts(
            number=self._number_of(i),
            states=self.states,
            project=lambda part, x: self._project(i, part, x),
            numbers=lambda name, count: self.weights.numbers(layer_name(i, name), count),
            numbers_if_any=lambda name, count: self.weights.numbers_if_any(layer_name(i, name), count),
            eps=self.decoder.eps,
        )

    def _number_of(self, i: int) -> int:
        """How many layers of its kind are before layer i."""
        kinds = [type(layer.state) for layer in self.decoder.layers]
        return kinds[:i].count(kinds[i])

    def _attention(self, i: int, layer: Layer, x: ov.Node) -> ov.Node:
        decoder, sizes = self.decoder, layer.sizes
        heads, read, part, gate = decoder.num_heads, x, Q, None
        if sizes.latent is not None and sizes.latent.query_rank:
            read, part = self._norm(layer_name(i, Q_NORM), self._project(i, Q_A, x), EPS), Q_B
        projected = self._project(i, part, read)
        if decoder.arch.attention.gate == "queries":
            projected, gate = self._gated(projected)
        elif decoder.arch.attention.gate in ("matrix", "heads"):
            gate = self._project(i, OUTPUT_GATE, x)
        queries = self._placed(i, "q", projected, heads, layer)
        if self.growth is not None and (layer.rope is None or not decoder.arch.attention.chunked):
            queries = ops.multiply(queries, self.growth)
        if sizes.keys_of is None:
            self.caches[i] = self._keys_and_values(i, layer, x)
        cached = self.caches[i if sizes.keys_of is None else sizes.keys_of]
        keys, values = (self._repeated(each, sizes) for each in cached)
        scale = floats(decoder.scales.attention)
        sinks = self.weights.vector(f"{layer_name(i, 'self_attn.sinks')}.weight")
        parts = [queries, keys, values, self.masks.of(layer.window), scale]
        if sinks is None:
            found = ops.scaled_dot_product_attention(*parts)
        else:
            parts.append(floats(sinks.reshape(1, heads, 1, 1)))
            inputs = [part.output(0) for part in parts]
            found = NodeFactory("opset13").create("ScaledDotProductAttention", inputs, {"causal": False})
        found = transposed(found, 0, 2, 1, 3)
        if decoder.arch.attention.gate == "heads" and gate is not None:
            found, gate = ops.multiply(found, ops.unsqueeze(ops.sigmoid(gate), ints(3))), None
        found = ops.reshape(found, ints(0, 0, heads * sizes.value_size), special_zero=True)
        if gate is not None:
            found = ops.multiply(found, ops.sigmoid(gate))
        return self._project(i, "self_attn.o_proj", found)

    def _keys_and_values(self, i: int, layer: Layer, x: ov.Node) -> list[ov.Node]:
        """Those of all tokens, each [batch, heads, tokens, size]."""
        sizes, number = layer.sizes, self._number_of(i)
        heads, size = sizes.num_kv_heads, sizes.head_size
        if sizes.latent is not None:
            keys, values = self._from_latent(i, layer, sizes.latent, x)
        else:
            made = self._project(i, "self_attn.k_proj", x)
            keys = self._placed(i, "k", made, heads, layer)
            made = made if sizes.values_are_keys else self._project(i, "self_attn.v_proj", x)
            if self.decoder.arch.varied:
                made = ops.reshape(made, ints(0, 0, heads, size), special_zero=True)
                made = rms_norm(made, None, self.decoder.eps)
            values = self._heads(made, heads, size)
        return [
            self._cached(f"past_key_values.{number}.{name}present.{number}.{name}", each, heads, width)
            for name, each, width in (("key", keys, size), ("value", values, sizes.value_size))
        ]

    def _from_latent(self, i: int, layer: Layer, latent: Latent, x: ov.Node) -> tuple[ov.Node, ov.Node]:
        """Keys and values [batch, heads, tokens, size] of each token's short row.

        The first numbers of a key are rotated, and are the same in all heads.
        """
        made, heads = self._project(i, KV_A, x), self.decoder.num_heads
        short = self._norm(layer_name(i, KV_NORM), _slice(made, 0, latent.rank, 2), EPS)
        turned = self._heads(_slice(made, latent.rank, END, 2), 1, latent.rotated)
        turned = ops.tile(self._rotated(turned, layer, latent.rotated), ints(1, heads, 1, 1))
        keys = ops.concat([turned, self._heads(self._project(i, K_B, short), heads, latent.plain)], -1)
        return keys, self._heads(self._project(i, V_B, short), heads, latent.value_size)

    def _placed(self, i: int, kind: str, x: ov.Node, num_heads: int, layer: Layer) -> ov.Node:
        """Queries or keys [batch, heads, tokens, size] after their norm, if they have one, and their rotation."""
        size = layer.sizes.head_size
        if not self.decoder.arch.attention.normed_after_rope:
            return self._rotated(self._heads(self._normed(i, kind, x, num_heads, size), num_heads, size), layer, size)
        rotated = self._rotated(self._heads(x, num_heads, size), layer, size)
        if self.decoder.arch.attention.normed_heads:
            return rotated if layer.rope is None else rms_norm(rotated, None, self.decoder.eps)
        return self._norm(layer_name(i, f"self_attn.{kind}_norm"), rotated)

    def _gated(self, projected: ov.Node) -> tuple[ov.Node, ov.Node]:
        """Queries and gates, both [batch, tokens, heads · size], of a product with those of each head side by side."""
        heads, size = self.decoder.num_heads, self.decoder.sizes.head_size
        both = ops.reshape(projected, ints(0, 0, heads, 2 * size), special_zero=True)
        queries, gate = (
            ops.reshape(part, ints(0, 0, heads * size), special_zero=True)
            for part in (_slice(both, 0, size), _slice(both, size, END))
        )
        return queries, gate

    def _project(self, i: int, part: str, x: ov.Node) -> ov.Node | ov.Output:
        """The product with a matrix of layer i, with its bias."""
        name = layer_name(i, part)
        parts = self.packed[name].parts
        if len(parts) == 1:
            return self._product(name, x)
        if name not in self.parts:  # all of them have the same x
            self.parts |= zip(parts, split(self._product(name, x), [*parts.values()]), strict=True)
        return self.parts[name]

    def _product(self, name: str, x: ov.Node) -> ov.Node:
        if self.packed[name].sums:
            x = self._with_sums(x, *self.packed[name].shape[1:])
        return self._biased(name, ops.matmul(x, self._matrix(name), False, True))

    def _with_sums(self, x: ov.Node, columns: int) -> ov.Node:
        """x with the sums of its blocks appended, for leftovers; see `own_codes`."""
        source = x.get_friendly_name()
        if source not in self.widened:
            self.widened[source] = _with_sums(x.output(0), columns // GROUP)
        return self.widened[source]

    def _matrix(self, name: str, experts: int = 0, factor: float = 1.0) -> ov.Node:
        made = self.packed[name].node(self.stored, experts, factor)
        ending = "weight" if factor == 1 else "enlarged"
        made.set_friendly_name(f"self.{'+'.join(self.packed[name].parts)}.{ending}")
        return made

    def _biased(self, name: str, product: ov.Node) -> ov.Node:
        parts = self.packed[name].parts if name in self.packed else {name: 0}
        found = {each: self.weights.vector(f"{each}.bias") for each in parts}
        if all(bias is None for bias in found.values()):
            return product
        rows = [np.zeros(parts[each]) if bias is None else bias for each, bias in found.items()]
        return ops.add(product, floats(np.concatenate(rows).reshape(1, 1, -1)))

    def _norm(self, name: str, x: ov.Node, eps: float | None = None) -> ov.Node:
        """A norm of the last axis; x itself where the architecture has none of this name."""
        eps = self.decoder.eps if eps is None else eps
        if name.endswith("."):
            return x
        weight, bias = (self.weights.vector(f"{name}.{kind}") for kind in ("weight", "bias"))
        if self.decoder.arch.norms.kind == "rms":
            if weight is None:
                raise self.weights.missing(f"{name}.weight")
            return rms_norm(x, weight, eps)
        found = ops.mvn(x, ints(-1), True, eps, "inside_sqrt")
        rank = rank_of(x)
        shape = (*[1] * (rank - 1), -1)
        found = found if weight is None else ops.multiply(found, floats(weight.reshape(shape)))
        return found if bias is None else ops.add(found, floats(bias.reshape(shape)))

    def _normed(self, i: int, kind: str, x: ov.Node, num_heads: int, size: int) -> ov.Node:
        """Queries or keys [batch, tokens, width] after their norm, if they have one: of each head, or of all."""
        name = layer_name(i, f"self_attn.{kind}_norm")
        weight = self.weights.vector(f"{name}.weight")
        if weight is None and not self.decoder.arch.attention.normed_heads:
            return x
        if weight is not None and len(weight) != size:
            return self._norm(name, x)
        x = ops.reshape(x, ints(0, 0, num_heads, size), special_zero=True)
        return rms_norm(x, None, self.decoder.eps) if weight is None else self._norm(name, x)

    def _heads(self, x: ov.Node, num_heads: int, size: int) -> ov.Node:
        """[batch, heads, tokens, size] of [batch, tokens, heads · size] or [batch, tokens, heads, size]."""
        if rank_of(x) == 3:
            x = ops.reshape(x, ints(0, 0, num_heads, size), special_zero=True)
        return transposed(x, 0, 2, 1, 3)

    def _rotation(self, rope: Rope) -> tuple[ov.Node, ov.Node]:
        """Cosines and sines, float32 [batch, 1, tokens, 2n]."""
        angles = angles_of(rope, ops.unsqueeze(self.position_ids, integer(1)))
        angles = transposed(angles, 0, 2, 1)
        angles = ops.concat([angles, angles], -1)
        cosines, sines = (
            ops.unsqueeze(_scaled(each, rope.scale), integer(1)) for each in (ops.cos(angles), ops.sin(angles))
        )
        return cosines, sines

    def _growth(self, growth: QueryGrowth) -> ov.Node:
        """What queries are multiplied by, float32 [batch, 1, tokens, 1]."""
        positions = ops.convert(unsqueezed(self.position_ids, 1, 3), "f32")
        if growth.offset:
            positions = ops.add(positions, floats(growth.offset))
        steps = ops.floor(ops.divide(positions, floats(growth.step)))
        grown = _scaled(ops.log(ops.add(steps, floats(1))), growth.growth)
        return ops.add(grown, floats(1))

    def _rotated(self, x: ov.Node, layer: Layer, size: int) -> ov.Node:
        """Queries or keys [batch, heads, tokens, size] with their first 2n numbers rotated, as two halves, or as is."""
        if layer.rope is None:
            return x
        cosines, sines = self.rotations[layer.rope]
        rotary = 2 * len(self.decoder.ropes[layer.rope].frequencies)
        whole = x
        if rotary < size:
            x = _slice(whole, 0, rotary)
        half = rotary // 2
        turned = ops.concat([_scaled(_slice(x, half, END), -1.0), _slice(x, 0, half)], -1)
        found = ops.add(ops.multiply(x, cosines), ops.multiply(turned, sines))
        return ops.concat([found, _slice(whole, rotary, END)], -1) if rotary < size else found

    def _cached(self, name: str, x: ov.Node, heads: int, size: int) -> ov.Node:
        """Keys or values [batch, heads, tokens, size] after those of earlier calls."""
        shape = ops.concat([self.batch, ints(heads), ints(0), ints(size)], 0)
        empty = ops.broadcast(floats(0), shape)
        info = util.VariableInfo()
        info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, heads, -1, size]), ov.Type.f32, name
        variable = util.Variable(info)
        past = ops.gather(ov.op.read_value(empty, variable), self.beam_idx, integer(0))
        self.masks.read_past(past)
        whole = ops.concat([past, x], -2)
        self.sinks.append(ov.op.assign(whole, variable))
        return whole

    def _repeated(self, x: ov.Node, sizes: LayerSizes) -> ov.Node:
        """Keys or values for each head of queries."""
        heads, kv_heads, size = self.decoder.num_heads, sizes.num_kv_heads, sizes.head_size
        if heads == kv_heads:
            return x
        shape = ops.shape_of(x, "i64")
        first, length = (ops.gather(shape, ints(*axes), integer(0)) for axes in ((0, 1), (2,)))
        wanted = ops.concat([first, ints(heads // kv_heads), length, ints(size)], 0)
        copies = ops.broadcast(ops.unsqueeze(x, integer(2)), wanted, "BIDIRECTIONAL")
        return ops.reshape(copies, ints(0, heads, -1, size), special_zero=True)


def _scaled(x: ov.Node, factor: float) -> ov.Node:
    return x if factor == 1 else ops.multiply(x, floats(factor))


def _slice(x: ov.Node, begin: int, end: int, axis: int = 3) -> ov.Node:
    return ops.slice(x, ints(begin), ints(end), ints(1), ints(axis))


def _with_sums(x: ov.Output, num_groups: int) -> ov.Node:
    """x [.., .., columns] with the sums of its groups appended, and zeros up to a whole group."""
    grouped = ops.reshape(x, np.array([0, 0, num_groups, GROUP], dtype=np.int64), special_zero=True)
    sums = ops.reduce_sum(grouped, np.array([-1], dtype=np.int64), keep_dims=False)
    if padding := -num_groups % GROUP:
        begin, end = np.zeros(3, dtype=np.int64), np.array([0, 0, padding], dtype=np.int64)
        sums = ops.pad(sums, begin, end, "constant", np.float32(0))
    return ops.concat([x, sums], -1)
