"""What the entry of an architecture says: its differences from Llama; `forms` has the entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Norms:
    """The names of a layer's norms in a checkpoint; "" where there is none.

    before_*: of what attention and feed-forward part read; after_*: of what they add to the residual stream.
    """

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


@dataclass(frozen=True)
class Form:
    """An architecture, by its `model_type` in config.json.

    Biases, norms of queries and keys, and tied matrices are not listed: they are there if the file has their tensors.

    gguf: its `general.architecture`; "" if its GGUF files are not read. interleaved: pairs of neighbours are
    rotated, so checkpoints have the rows of queries and keys in that order; gguf_interleaved: llama.cpp's files
    have. norm: "rms", or "layer" for mean and variance. norm_offset: added to the weights of norms in a checkpoint,
    but those of `plain_norms`. scale_embedding: embeddings are multiplied by the square root of their width.
    norm_embedding: they have a norm without weights. fused: one matrix holds queries, keys and values (`qkv_proj`).
    fused_mlp: one holds gate and up (`gate_up_proj`). windows: which layers have the sliding window where
    `layer_types` is missing: "none", "all", "late" (from max_window_layers on), or a number n: all but each n-th;
    of −n, layers are counted from the last. rotated: which layers rotate queries and keys: "all", "none",
    "sliding", by `no_rope_layers`, by `layer_rope_theta`, or by `position_embedding_type`. local_theta: layers with
    a window rotate by frequencies of their own: by `rope_local_base_freq`, or by the same base without scaling.
    normed_after_rope: norms of queries and keys come after their rotation. normed_heads: queries and keys have
    norms, without weights if the file has none. gated: what attention finds is multiplied by a sigmoid, whose rows
    in `q_proj` follow each head's. gate: a matrix of its own (`self_attn.output_gate`) gives that sigmoid.
    in_blocks: attention, states and feed-forward parts are numbered each on their own, see `Blocks`. ungated:
    feed-forward parts are down(act(up)), by the square of ReLU, too. names: what checkpoints call modules that have
    other names here, which are Llama's where it has such, or tensors, with {} for the number of an expert. keys:
    what config.json calls keys that have other names here. router, shared: of mixtures of experts, see `Experts`;
    "" for dense models. clamped: as there; their matrices are stored by columns, or in MXFP4. varied: layers differ
    in their sizes, as `sizes` says, values have a norm without weights, and a layer's output may be scaled. streams: a
    token has several residual streams, see `Streams`, and feed-forward parts may let pass few numbers. latent: keys and
    values are made of a short row of each token, see `Latent`. grouped: experts may be in groups, their weights
    scaled, and some layers dense, as DeepSeek's. by_columns: the matrices of experts are stored by columns. chunked:
    layers may attend within chunks of `attention_chunk_size` tokens, of which the context has one; the queries of those
    that do not rotate grow with their position.
    defaults: what Transformers takes for keys that config.json lacks.
    """

    name: str
    gguf: str = ""
    interleaved: bool = False
    gguf_interleaved: bool = False
    norms: Norms = field(default_factory=Norms)
    norm: str = "rms"
    norm_offset: float = 0.0
    plain_norms: tuple[str, ...] = ()
    scale_embedding: bool = False
    norm_embedding: bool = False
    fused: bool = False
    fused_mlp: bool = False
    windows: str | int = "none"
    rotated: str = "all"
    local_theta: bool = False
    normed_after_rope: bool = False
    normed_heads: bool = False
    gated: bool = False
    in_blocks: bool = False
    ungated: bool = False
    gate: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    router: str = ""
    shared: str = ""
    clamped: bool = False
    varied: bool = False
    streams: bool = False
    latent: bool = False
    grouped: bool = False
    by_columns: bool = False
    chunked: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def in_checkpoint(self, name: str) -> str:
        """The name in checkpoints of a module, or of a tensor."""
        if (renamed := _renamed(name, self.names)) != name:
            return renamed
        module, _, kind = name.rpartition(".")
        return f"{_renamed(module, self.names)}.{kind}" if kind in ("weight", "bias") else name

    def offset_of(self, name: str) -> float:
        """What is added to a tensor of a checkpoint: to norms, but not to those inside of recurrences."""
        is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
        return self.norm_offset if is_norm and name not in self.plain_norms else 0.0

    def of_checkpoint(self, name: str) -> str:
        """The name here of a module that is called so in checkpoints."""
        return _renamed(name, {theirs: ours for ours, theirs in self.names.items()})


def _renamed(name: str, names: Mapping[str, str]) -> str:
    *before, part = name.split(".", 3) if name.startswith("model.layers.") else [name]
    return ".".join([*before, names.get(part, part)])
