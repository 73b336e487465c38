"""What the entry of an architecture says: its differences from Llama; `archs.toml` has the entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class NotDirect(Exception):
    """Raised for a model that needs the exporter with PyTorch; the message completes "it has …"."""


@dataclass(frozen=True)
class Norms:
    """The names of a layer's norms in a checkpoint, "" where there is none; and what all norms compute.

    before_*: of what attention and feed-forward part read; after_*: of what they add to the residual stream.
    """

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    kind: str = "rms"  # or "layer", for mean and variance
    offset: float = 0.0  # added to the weights of norms in a checkpoint
    plain: tuple[str, ...] = ()  # but to these


@dataclass(frozen=True)
class ArchMatrices:
    """How files store matrices."""

    interleaved: bool = False  # checkpoints have the rows of queries and keys in pairs that are rotated together
    gguf_interleaved: bool = False  # llama.cpp's files have
    fused: bool = False  # one matrix holds queries, keys and values (`qkv_proj`)
    fused_mlp: bool = False  # one holds gate and up (`gate_up_proj`)


@dataclass(frozen=True)
class ArchAttention:
    """What is attended to, and by what queries and keys. Keys that a comment names are those of config.json."""

    # Layers that have the sliding window where `layer_types` is missing: "none", "all", "late" (from max_window_layers
    # on), "named" (it must not be missing), or a number n: all but each n-th; of −n, layers are counted from the last.
    windows: str | int = "none"
    # Layers that rotate queries and keys: "all", "none", "sliding", by `no_rope_layers`, by `layer_rope_theta` or else
    # those with a window, by the same key ("bases") or else all, or by `position_embedding_type`.
    rotated: str = "all"
    # Layers with a window rotate by `rope_local_base_freq`, or by the same base without scaling.
    local_theta: bool = False
    normed_after_rope: bool = False  # norms of queries and keys come after their rotation
    normed_heads: bool = False  # queries and keys have norms, without weights if the file has none
    # Its result is multiplied by a sigmoid, of rows in `q_proj` that follow each head's ("queries"), or of a matrix of
    # its own, `self_attn.output_gate`, for each number ("matrix") or each head ("heads"); "": it is not.
    gate: str = ""
    latent: bool = False  # keys and values are made of a short row of each token, see `Latent`
    # Layers may attend within chunks of `attention_chunk_size` tokens, of which the context has one; the queries of
    # those that do not rotate grow with their position.
    chunked: bool = False


@dataclass(frozen=True)
class ArchExperts:
    """Mixtures of experts; see `Experts`."""

    router: str = ""  # "": a dense model
    shared: str = ""  # experts that read every token
    clamped: bool = False  # their matrices are stored by columns, or in MXFP4
    by_columns: bool = False  # their matrices are stored by columns
    grouped: bool = False  # in groups, with scaled weights and some dense layers, as DeepSeek has


@dataclass(frozen=True)
class Arch:
    """An architecture, by its `model_type` in config.json.

    Biases, norms of queries and keys, and tied matrices are not listed: they are there if the file has their tensors.
    """

    name: str
    gguf: str = ""  # its `general.architecture`; "" if its GGUF files are not read
    # By the names here (Llama's, where it has such), what checkpoints call modules or tensors; {}: an expert's number.
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)  # the same for keys of config.json
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what Transformers takes for keys that are missing
    adjust: Callable[[dict[str, Any]], None] | None = None  # has a configuration say what others' do; see `adjustments`
    switches: tuple[str, ...] = ()  # keys that change what is computed, which the graph does not have
    in_gguf: Mapping[str, Any] = field(default_factory=dict)  # keys of its GGUF files, whatever their metadata say
    adjust_gguf: Callable[[dict[str, Any]], None] | None = None  # as `adjust`, of what the metadata say
    matrices: ArchMatrices = ArchMatrices()
    norms: Norms = Norms()
    # "scaled": embeddings are multiplied by the square root of their width. "normed": they have a norm without weights.
    embedding: str = ""
    attention: ArchAttention = ArchAttention()
    ungated: bool = False  # feed-forward parts are down(act(up)), by the square of ReLU, too
    experts: ArchExperts = ArchExperts()
    # "varied": layers differ in their sizes, as `sizes` says, values have a norm without weights, and outputs may be
    # scaled. "streams": besides, a token has several residual streams, see `Streams`, and feed-forward parts may let
    # pass few numbers. "blocks": attention, states and feed-forward parts are numbered each on their own, see `Blocks`.
    # "parallel": the feed-forward part reads what attention reads, and both are added.
    layers: str = ""

    @property
    def varied(self) -> bool:
        """Whether layers differ in their sizes."""
        return self.layers in ("varied", "streams")

    def in_checkpoint(self, name: str) -> str:
        """The name in checkpoints of a module, or of a tensor."""
        if (renamed := _renamed(name, self.names)) != name:
            return renamed
        module, _, kind = name.rpartition(".")
        return f"{_renamed(module, self.names)}.{kind}" if kind in ("weight", "bias") else name

    def offset_of(self, name: str) -> float:
        """What is added to a tensor of a checkpoint: to norms, but not to those inside of recurrences."""
        is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
        return self.norms.offset if is_norm and name not in self.norms.plain else 0.0

    def of_checkpoint(self, name: str) -> str:
        """The name here of a module that is called so in checkpoints."""
        return _renamed(name, {theirs: ours for ours, theirs in self.names.items()})


def _renamed(name: str, names: Mapping[str, str]) -> str:
    *before, part = name.split(".", 3) if name.startswith("model.layers.") else [name]
    return ".".join([*before, names.get(part, part)])
