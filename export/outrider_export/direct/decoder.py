"""What a decoder computes, layer by layer; `describe` makes it of a configuration, and `graph` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.models.backends.projections import ATTENTION, FEED_FORWARD
from outrider_export.direct.arch import Arch
from outrider_export.direct.experts import Experts
from outrider_export.direct.latent import Latent
from outrider_export.direct.rope import Rope
from outrider_export.direct.sizes import Blocks, LayerSizes
from outrider_export.direct.states import State
from outrider_export.direct.streams import Streams

OUTPUT_GATE = "self_attn.output_gate"
_OF_LAYERS = "model.layers."


@dataclass(frozen=True)
class Layer:
    """window: its sliding window in tokens; 0 for none. rope: the key of its rotation in `Decoder.ropes`, or None.

    state: what it keeps instead of keys and values; None for attention, which has the others. experts: None for a dense
    feed-forward part. feeds: whether it has a feed-forward part. cutoff: how many standard deviations above the mean
    the gate's numbers have to be to pass, before its activation; None for all.
    """

    window: int
    rope: str | None
    state: State | None
    experts: Experts | None
    sizes: LayerSizes
    feeds: bool = True
    cutoff: float | None = None

    @property
    def attention(self) -> list[str]:
        """The matrices of its attention."""
        if self.sizes.latent is not None:
            return [*self.sizes.latent.parts]
        lacking = {"self_attn.v_proj"} if self.sizes.values_are_keys else set()
        lacking |= {"self_attn.k_proj", "self_attn.v_proj"} if self.sizes.keys_of is not None else set()
        return [name for name in ATTENTION if name not in lacking]

    @property
    def reading_alike(self) -> list[str]:
        """The matrices that multiply the same rows, and a gate that it may lack."""
        if self.state is not None:
            return [*self.state.reading_alike]
        return [] if self.sizes.latent is not None else [*self.attention[:-1], OUTPUT_GATE]


@dataclass(frozen=True)
class Scales:
    """Factors of a decoder's numbers."""

    attention: float  # of products of queries and keys
    embedding: float
    residual: float  # of what each part adds to the residual stream
    logits: float
    logit_cap: float  # logits become cap · tanh(logits / cap); 0 for none


@dataclass(frozen=True)
class QueryGrowth:
    """Queries are multiplied by 1 + growth · ln(1 + ⌊(position + offset) / step⌋)."""

    growth: float
    step: int
    offset: int


@dataclass(frozen=True)
class ContextLimits:
    """How far a decoder's rotations and its attention hold, in tokens."""

    length: int | None  # the context's, where it is not config.json's
    chunk: int  # that some layers attend within, so that the context ends there; 0 if all attend to all
    long_from: int  # longer texts rotate by `Rope.long`; 0 if none does


@dataclass(frozen=True)
class LayerEmbedding:
    """The embedding that each layer has of its own."""

    width: int
    num_tokens: int  # that have one, the first of the vocabulary; 0 for all


@dataclass(frozen=True)
class Decoder:
    """A decoder without its weights."""

    arch: Arch
    hidden_size: int
    num_heads: int
    sizes: LayerSizes  # of a layer with a sliding window, where layers differ
    eps: float  # of norms
    after_eps: float  # of norms after attention and feed-forward part
    activation: str
    ropes: Mapping[str, Rope]
    layers: tuple[Layer, ...]
    scales: Scales
    query_growth: QueryGrowth | None
    tied: bool
    limits: ContextLimits
    layer_embedding: LayerEmbedding | None
    blocks: Blocks | None  # the numbers of the layers' parts in files, where these are not those of the layers
    streams: Streams | None  # of the residual, where a token has several

    def in_file(self, name: str) -> str:
        """A tensor's or a module's name with the number that its part has in files."""
        if self.blocks is None or not name.startswith(_OF_LAYERS):
            return name
        layer, part = name.removeprefix(_OF_LAYERS).split(".", 1)
        if part.startswith("mixer."):  # a file's name already, of an expert's matrix
            return name
        feeds = part.startswith(("mlp.", f"{self.arch.norms.before_mlp}."))
        number = self.blocks.number(int(layer), feeds=feeds)
        return name if number is None else f"{_OF_LAYERS}{number}.{part}"

    def of_file(self, name: str) -> str:
        """The opposite: a module's name with the number of its layer."""
        if self.blocks is None or not name.startswith(_OF_LAYERS):
            return name
        number, part = name.removeprefix(_OF_LAYERS).split(".", 1)
        layer = self.blocks.layer(int(number)) if number.isdecimal() else None
        return name if layer is None else f"{_OF_LAYERS}{layer}.{part}"

    def feed_forward_of(self, layer: Layer) -> tuple[str, ...]:
        """The matrices of a layer's dense feed-forward part, or of its shared expert; () if it has none."""
        if not layer.feeds or (layer.experts is not None and not layer.experts.shared):
            return ()
        return FEED_FORWARD[1:] if self.arch.ungated else FEED_FORWARD

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """By layer with attention, the heads of its own keys and values and their size, (0, 0) if it has none.

        () if all are alike.
        """
        sizes = [layer.sizes for layer in self.layers if layer.state is None]
        found = tuple((each.num_kv_heads, each.head_size) if each.keys_of is None else (0, 0) for each in sizes)
        return found if len({*found}) > 1 else ()

    @property
    def latent(self) -> Latent | None:
        """What keys and values are made of; None for products of the residual stream."""
        return self.layers[0].sizes.latent

    @property
    def windows(self) -> list[int]:
        """The sliding window of each layer with attention, in tokens; 0 for none."""
        return [layer.window for layer in self.layers if layer.state is None]

    @property
    def states(self) -> tuple[str, ...]:
        """The kind of state of each layer, "" for attention; () if all layers have attention."""
        kinds = tuple("" if layer.state is None else layer.state.kind for layer in self.layers)
        return kinds if any(kinds) else ()

    @property
    def experts(self) -> Experts | None:
        """Those of the first layer that has a mixture."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    @property
    def rotary_size(self) -> int:
        """How many numbers of each head are rotated."""
        return 2 * len(next(iter(self.ropes.values())).frequencies)
