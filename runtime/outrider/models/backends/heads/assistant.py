"""Gemma 4's assistants: layers that make queries only, and read the main model's keys and values.

Such a drafter has no cache. Each layer reads what the main model's last layer of its kind, with a sliding window or
without, has in the cache for the tokens before the newest one. A draft is made token by token, and none of its tokens
has keys and values: all of them are at the newest token's position. Beside a token's embedding, which is the main
model's, it reads the main model's last hidden states, or those that it made itself with the draft token before.

Its output matrix may be in clusters: only tokens of the clusters whose centroids are nearest have logits.

Inputs of the graph: input_ids int64 [s], position_ids int64 [s], hidden_states float32 [s, width], of s sequences, and
for each kind of layer key_cache.i and value_cache.i, which are the main model's, blocks.i int64 [s, b], their blocks in
the order of the text, and begins.i int64 [s], the position of the first token in these. Outputs: logits float32
[s, 1, vocabulary], next_hidden float32 [s, width].

Source: Transformers 5.6, models/gemma4_assistant/modeling_gemma4_assistant.py; the position and what is concatenated:
generation/candidate_generator.py, `SinglePositionMultiTokenCandidateGenerator`. A sliding window is that of any layer
(as in llama.cpp, src/models/gemma4-assistant.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.errors import BundleError
from outrider.models.backends.features import NEXT_HIDDEN
from outrider.models.backends.heads.layers import AFTER_ATTENTION, Rotation, after_feed_forward, linear, norm
from outrider.models.backends.heads.weights import HeadWeights
from outrider.models.backends.nodes import floats, integer, ints, parameter, result
from outrider.models.backends.paged_graph import HIDDEN_IN

BLOCKS, BEGINS = "blocks.", "begins."
CACHE, WINDOW, KV_HEADS = "cache", "window", "kv_heads"  # numbers of a layer
CENTROIDS, NUM_CLUSTERS, ORDER = "clusters.centroids", "clusters.active", "clusters.token_ids"
CLUSTERED = "clusters.lm_head"  # the output matrix, with the rows of a cluster one after the other
_NEVER = -1e4  # a score or logit that counts for nothing, in half precision too
_BLOCK_SIZE = 32  # of a graph that is only checked


def assistant(weights: HeadWeights, caches: Mapping[str, ov.ConstOutput] | None = None) -> ov.Model:
    """The graph. caches: the main model's inputs for its cache, by name; None: any that fit the weights.

    Raises:
        BundleError: when the main model's cache has another shape than the weights were trained for.
    """
    width = weights.width("post_projection.weight", 0)
    token_ids, positions = (parameter(name, ov.Type.i64, (-1,)) for name in ("input_ids", "position_ids"))
    states = parameter(HIDDEN_IN, ov.Type.f32, (-1, width))
    both = ops.concat([weights.embed(token_ids), ops.unsqueeze(states, ints(1))], 2)
    hidden = linear(both, weights, "pre_projection")
    cached: dict[int, _Cached] = {}
    for i in range(int(weights.number("num_layers"))):
        layer = f"layers.{i}"
        number = int(weights.number(f"{layer}.{CACHE}"))
        if number not in cached:
            cached[number] = _Cached(weights, layer, number, positions, caches)
        rows = norm(hidden, weights, f"{layer}.input_layernorm")
        read = cached[number].attend(linear(rows, weights, f"{layer}.self_attn.q_proj"), f"{layer}.self_attn.q_norm")
        read = linear(read, weights, f"{layer}.self_attn.o_proj")
        hidden = ops.add(hidden, norm(read, weights, f"{layer}.{AFTER_ATTENTION}"))
        hidden = after_feed_forward(hidden, weights, layer)
    hidden = norm(hidden, weights, "norm")
    clustered = f"{CENTROIDS}.weight" in weights
    logits = _clustered_logits(hidden, weights) if clustered else weights.logits(hidden)
    made = ops.squeeze(linear(hidden, weights, "post_projection"), ints(1))
    inputs = [token_ids, positions, states, *(each for its in cached.values() for each in its.parameters)]
    return ov.Model([result("logits", logits), result(NEXT_HIDDEN, made)], inputs)


def windows_of(weights: HeadWeights) -> dict[int, int]:
    """The number of each layer with a cache that is read, and the sliding window of its readers; 0 for none."""
    layers = [f"layers.{i}" for i in range(int(weights.number("num_layers")))]
    return {int(weights.number(f"{layer}.{CACHE}")): _window_of(weights, layer) for layer in layers}


def _window_of(weights: HeadWeights, layer: str) -> int:
    return int(weights.number(f"{layer}.{WINDOW}")) if f"{layer}.{WINDOW}" in weights else 0


class _Cached:
    """Keys and values of one layer of the main model, and the attention to them of all layers of its kind."""

    def __init__(
        self,
        weights: HeadWeights,
        layer: str,
        number: int,
        positions: ov.Node,
        caches: Mapping[str, ov.ConstOutput] | None,
    ) -> None:
        self._weights = weights
        self._size = weights.width(f"{layer}.self_attn.q_norm.weight", 0)
        self._num_kv_heads = int(weights.number(f"{layer}.{KV_HEADS}"))
        window = _window_of(weights, layer)
        kind = "sliding" if window else "full"
        self._rotation = Rotation.of(ops.unsqueeze(positions, ints(1)), weights, f"rotary.{kind}")
        self._blocks = parameter(f"{BLOCKS}{number}", ov.Type.i64, (-1, -1))
        self._begins = parameter(f"{BEGINS}{number}", ov.Type.i64, (-1,))
        self._caches = [self._cache(f"{name}_cache.{number}", caches) for name in ("key", "value")]
        self._keys, self._values = (self._gathered(each) for each in self._caches)
        self._scores = self._unseen(positions, window)

    @property
    def parameters(self) -> list[Any]:
        """The graph's inputs for it."""
        return [*self._caches, self._blocks, self._begins]

    def attend(self, projected: ov.Node, norm_name: str) -> ov.Node:
        """What queries [s, 1, heads · size] read, in the same shape. They are not scaled, as their norm does that."""
        heads = ops.reshape(projected, ints(0, 0, -1, self._size), special_zero=True)
        queries = self._rotation(norm(heads, self._weights, norm_name))
        grouped = ops.reshape(queries, ints(0, 1, self._num_kv_heads, -1, self._size), special_zero=True)
        scores = ops.matmul(grouped, self._keys, False, True)  # [s, b, heads of keys, queries of each, block size]
        # Softmax is over blocks and their tokens, as the last two axes.
        scores = ops.add(ops.transpose(scores, ints(0, 2, 3, 1, 4)), self._scores)
        shape = ops.shape_of(scores, "i64")
        flat = ops.softmax(ops.reshape(scores, ints(0, 0, 0, -1), special_zero=True), 3)
        shares = ops.transpose(ops.reshape(flat, shape, special_zero=False), ints(0, 3, 1, 2, 4))
        read = ops.reduce_sum(ops.matmul(shares, self._values, False, False), ints(1), False)
        return ops.reshape(read, ints(0, 1, -1), special_zero=True)

    def _cache(self, name: str, caches: Mapping[str, ov.ConstOutput] | None) -> Any:
        """The input for a tensor [blocks, heads, block size, size] of the main model's cache."""
        if caches is None:
            return parameter(name, ov.Type.f32, (-1, self._num_kv_heads, _BLOCK_SIZE, self._size))
        port = caches.get(name)
        shape = None if port is None else port.partial_shape
        if port is None or shape is None or [shape[1], shape[3]] != [self._num_kv_heads, self._size]:
            has = "none" if shape is None else f"{shape[1]} of {shape[3]}"
            raise BundleError(
                f"The assistant reads {name} with {self._num_kv_heads} heads of {self._size} numbers, and the main "
                f"model has {has}. Add the assistant of this main model again."
            )
        made = ops.parameter(shape, dtype=port.element_type, name=name)
        made.output(0).set_names({name})
        return made

    def _gathered(self, cache: Any) -> ov.Node:
        """Keys or values of each sequence, float32 [s, b, heads, block size, size]."""
        return ops.convert(ops.gather(cache, self._blocks, integer(0)), "f32")

    def _unseen(self, positions: ov.Node, window: int) -> ov.Node:
        """0 for tokens that a sequence's newest token sees, and `_NEVER` for others, [s, 1, 1, b, block size]."""
        lengths = ops.shape_of(self._keys, "i64")
        sizes = ops.gather(lengths, ints(1, 3), integer(0))
        count = ops.reduce_prod(sizes, ints(0), False)
        numbers = ops.range(integer(0), count, integer(1), "i64")
        places = ops.add(ops.unsqueeze(self._begins, ints(1)), ops.unsqueeze(numbers, ints(0)))
        newest = ops.unsqueeze(positions, ints(1))
        seen = ops.less(places, newest)
        if window:
            seen = ops.logical_and(seen, ops.less(ops.subtract(newest, places), ints(window)))
        scores = ops.select(seen, floats(0), floats(_NEVER))
        return ops.reshape(scores, ops.concat([ints(-1, 1, 1), sizes], 0), special_zero=False)


def _clustered_logits(rows: ov.Node, weights: HeadWeights) -> ov.Node:
    """Logits [s, 1, vocabulary] of the tokens in the clusters that a row is nearest to."""
    num_clusters = weights.width(f"{CENTROIDS}.weight", 0)
    vocab_size = weights.width(f"{CLUSTERED}.weight", 0)
    size = vocab_size // num_clusters
    scores = linear(rows, weights, CENTROIDS)
    nearest = ops.topk(scores, integer(int(weights.number(NUM_CLUSTERS))), 2, "max", "none", "i64").output(1)
    # The rows of a cluster are one after the other: [s, clusters, size].
    places = ops.add(
        ops.multiply(ops.reshape(nearest, ints(0, -1, 1), special_zero=True), ints(size)),
        ops.constant(np.arange(size, dtype=np.int64).reshape(1, 1, -1)),
    )
    places = ops.reshape(places, ints(0, -1), special_zero=True)
    found = ops.matmul(rows, ops.gather(weights[f"{CLUSTERED}.weight"], places, integer(0)), False, True)
    found = ops.squeeze(found, ints(1))
    shape = ops.concat([ops.gather(ops.shape_of(rows, "i64"), ints(0), integer(0)), ints(vocab_size)], 0)
    others = ops.broadcast(floats(_NEVER), shape)
    token_ids = ops.gather(weights[ORDER], places, integer(0))
    logits = ops.scatter_elements_update(others, token_ids, found, integer(1))
    return ops.unsqueeze(logits, ints(1))
