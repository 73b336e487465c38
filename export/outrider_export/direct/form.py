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

    Keys that a comment names are those of config.json.
    """

    name: str
    gguf: str = ""  # its `general.architecture`; "" if its GGUF files are not read
    # Names
    # By the names here (Llama's, where it has such), what checkpoints call modules or tensors; {}: an expert's number.
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)  # the same for keys of config.json
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what Transformers takes for keys that are missing
    # Matrices
    interleaved: bool = False  # checkpoints have the rows of queries and keys in pairs that are rotated together
    gguf_interleaved: bool = False  # llama.cpp's files have
    fused: bool = False  # one matrix holds queries, keys and values (`qkv_proj`)
    fused_mlp: bool = False  # one holds gate and up (`gate_up_proj`)
    # Norms and the embedding
    norms: Norms = field(default_factory=Norms)
    norm: str = "rms"  # or "layer", for mean and variance
    norm_offset: float = 0.0  # added to the weights of norms in a checkpoint
    plain_norms: tuple[str, ...] = ()  # but to these
    scale_embedding: bool = False  # embeddings are multiplied by the square root of their width
    norm_embedding: bool = False  # embeddings have a norm without weights
    # Attention
    # Layers that have the sliding window where `layer_types` is missing: "none", "all", "late" (from max_window_layers
    # on), or a number n: all but each n-th; of −n, layers are counted from the last.
    windows: str | int = "none"
    # Layers that rotate queries and keys: "all", "none", "sliding", by `no_rope_layers`, by `layer_rope_theta`, or by
    # `position_embedding_type`.
    rotated: str = "all"
    # Layers with a window rotate by `rope_local_base_freq`, or by the same base without scaling.
    local_theta: bool = False
    normed_after_rope: bool = False  # norms of queries and keys come after their rotation
    normed_heads: bool = False  # queries and keys have norms, without weights if the file has none
    gated: bool = False  # its result is multiplied by a sigmoid, whose rows in `q_proj` follow each head's
    gate: bool = False  # a matrix of its own (`self_attn.output_gate`) gives that sigmoid
    latent: bool = False  # keys and values are made of a short row of each token, see `Latent`
    # Layers may attend within chunks of `attention_chunk_size` tokens, of which the context has one; the queries of
    # those that do not rotate grow with their position.
    chunked: bool = False
    # Feed-forward parts
    ungated: bool = False  # they are down(act(up)), by the square of ReLU, too
    router: str = ""  # of mixtures of experts, see `Experts`; "": a dense model
    shared: str = ""  # experts that read every token, see `Experts`
    clamped: bool = False  # see `Experts`; their matrices are stored by columns, or in MXFP4
    by_columns: bool = False  # the matrices of experts are stored by columns
    grouped: bool = False  # experts in groups, scaled weights and some dense layers, as DeepSeek has
    # Layers
    in_blocks: bool = False  # attention, states and feed-forward parts are numbered each on their own, see `Blocks`
    # Layers differ in their sizes, as `sizes` says, values have a norm without weights, and outputs may be scaled.
    varied: bool = False
    # A token has several residual streams, see `Streams`, and feed-forward parts may let pass few numbers.
    streams: bool = False

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
