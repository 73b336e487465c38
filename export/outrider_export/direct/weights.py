"""The weights of a decoder, by the names of Llama's checkpoints, from any kind of file.

Files are mapped, not read whole; a matrix is unpacked some rows at a time. Matrices that a file holds as one are taken
apart, and rows of queries and keys that are stored for rotating neighbours are put in the order for rotating halves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider_export.direct.decoder import Decoder, Layer
from outrider_export.direct.experts import GATE_UP, ROUTER, Experts
from outrider_export.direct.latent import K_B, V_B, Latent, rows_in_checkpoint
from outrider_export.direct.rope import halves_order
from outrider_export.direct.states import GatedDeltaNet, State, rows_in_fused
from outrider_export.sources.gguf_values import StoredBlocks
from outrider_export.sources.peft_adapter import Change, LoraAdapter, check_fits
from outrider_export.sources.source import name_in_text

Rows = NDArray[np.float32]
Indices = NDArray[np.int64]

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens", "lm_head", "model.norm"
# Of decoders whose layers have embeddings of their own: one of all, one below the other by token, and what reads them.
LAYER_EMBEDDING, LAYER_INPUTS = "model.embed_tokens_per_layer", "model.per_layer_model_projection"
LAYER_NORM = "model.per_layer_projection_norm"
LAYER_GATE, LAYER_PROJECTION = "per_layer_input_gate", "per_layer_projection"


def layer_name(i: int, part: str) -> str:
    """The name of a part of layer i."""
    return f"model.layers.{i}.{part}"


def layer_of(name: str) -> tuple[int | None, str]:
    """A module's layer, and its name there; None and the name if it is in no layer."""
    if not name.startswith("model.layers."):
        return None, name
    _, _, i, part = name.split(".", 3)
    return int(i), part


@dataclass(frozen=True)
class StoredMatrix:
    """Numbers in a file; of all experts' matrices, one below the other."""

    shape: tuple[int, ...]
    num_bytes: int  # in the file
    # Some rows as float32, by a slice or their numbers: new ones, or what cannot be written to.
    read: Callable[[slice | Indices], Rows]
    is_mxfp4: bool = False
    blocks: Callable[[slice | Indices], StoredBlocks] | None = None  # of some rows, of a file in 4 bits

    def of_rows(self, rows: Indices) -> StoredMatrix:
        """These of its rows, in this order."""
        num_bytes = self.num_bytes * len(rows) // self.shape[0]
        blocks = self.blocks
        chosen = None if blocks is None else lambda part: blocks(rows[part])
        return StoredMatrix((len(rows), *self.shape[1:]), num_bytes, lambda part: self.read(rows[part]), blocks=chosen)


def below_each_other(parts: Sequence[StoredMatrix]) -> StoredMatrix:
    """Matrices of as many columns as one, below each other."""
    ends = np.cumsum([part.shape[0] for part in parts])

    def read(rows: slice | Indices) -> Rows:
        wanted = np.arange(*rows.indices(int(ends[-1]))) if isinstance(rows, slice) else rows
        runs = np.split(wanted, np.flatnonzero(np.diff(np.searchsorted(ends, wanted, side="right"))) + 1)
        return np.concatenate([read_run(run) for run in runs])

    def read_run(rows: Indices) -> Rows:
        """Rows of one part."""
        number = int(np.searchsorted(ends, rows[0], side="right"))
        first = rows - (int(ends[number - 1]) if number else 0)
        is_span = len(first) == first[-1] - first[0] + 1 and (np.diff(first) == 1).all()
        return parts[number].read(slice(int(first[0]), int(first[-1]) + 1) if is_span else first)

    return StoredMatrix((int(ends[-1]), parts[0].shape[1]), sum(part.num_bytes for part in parts), read)


class Weights(ABC):
    """The weights of one model. interleaved: queries and keys are stored for rotating neighbours."""

    def __init__(self, decoder: Decoder, *, interleaved: bool) -> None:
        self.decoder = decoder
        self._interleaved = interleaved
        self._changes: dict[str, Change] = {}  # of an adapter, by module
        # int64 [n], the rows of the output matrix that are wanted; None: all. It is no part of the embedding then.
        self.proposed: Indices | None = None

    def merge(self, adapter: LoraAdapter) -> None:
        """Have an adapter's changes added in float32, as PEFT's `safe_merge`.

        Raises:
            ExportError: when the model has no such module, or one of another shape.
        """

        def find(name: str) -> tuple[int, ...] | str | None:
            name = self._own(name)
            layer, (_, part) = self._layer_of(name), layer_of(name)
            if layer is not None and layer.state is not None and f"{part}.weight" in layer.state.others:
                return "is no linear layer"
            if layer is not None and layer.experts is not None and part in (*layer.experts.shapes, GATE_UP):
                return "has the matrices of all experts"
            module = None if "norm" in name.rsplit(".", 1)[-1] else self.stored(f"{name}.weight")
            if module is not None and name == EMBEDDING:
                return "is an Embedding"
            if module is not None and name == HEAD and self.decoder.tied:
                return "shares its weights with the embedding"
            return None if module is None else module.shape

        check_fits(adapter, find)
        self._changes = {self._own(name): change for name, change in adapter.modules.items()}

    def _own(self, name: str) -> str:
        """The name here of a module that is called so in checkpoints, or in those that read images, too."""
        return self.decoder.of_file(self.decoder.arch.of_checkpoint(name_in_text(name)))

    @abstractmethod
    def stored(self, name: str) -> StoredMatrix | None:
        """A tensor of the file, such as "lm_head.weight"; None if it does not have it.

        Raises:
            ExportError: when its type cannot be read.
        """

    @abstractmethod
    def missing(self, name: str) -> ExportError:
        """The error for a tensor that the file has to have."""

    @property
    def is_tied(self) -> bool:
        """Whether the files have no output matrix but the embedding."""
        return self.decoder.tied or self.stored(f"{HEAD}.weight") is None

    def matrix(self, name: str) -> StoredMatrix:
        """A matrix, by its name without ".weight", with what an adapter adds.

        Raises:
            ExportError: when it is missing, of another shape, or of a type that cannot be read.
        """
        if name == HEAD and self.proposed is not None:
            return self._whole(EMBEDDING if self.is_tied else HEAD).of_rows(self.proposed)
        return self._whole(name)

    def _whole(self, name: str) -> StoredMatrix:
        layer, (_, part) = self._layer_of(name), layer_of(name)
        experts = None if layer is None else layer.experts
        if experts is not None and part in experts.shapes:
            if part == GATE_UP:
                return self._taking_turns(name, experts.shapes[part])
            return self._experts(name, experts.count, experts.shapes[part])
        state = self.state_of(name)
        if isinstance(state, GatedDeltaNet) and self.stored(f"{name}.weight") is None:
            return self._in_fused(name, state)
        if self.decoder.latent is not None and part in (K_B, V_B) and (own := self.stored(f"{name}.weight")):
            return self._by_head(name, own, self.decoder.latent)
        module, span = place_of(name, self.decoder)
        whole = self.stored(f"{module}.weight")
        found = self._part(name, "weight")
        if whole is None or found is None:
            raise self.missing(f"{module}.weight")
        self._check_shape(module, whole.shape, self._shape_of(module))
        in_order = self.rows_of(name, whole.shape[0]) if self.decoder.arch.matrices.interleaved else span
        found = self._changed(module, found, in_order)
        return _one_below_the_other(found, len(self.decoder.layers)) if name == LAYER_EMBEDDING else found

    def _changed(self, module: str, found: StoredMatrix, rows: slice | Indices | None = None) -> StoredMatrix:
        """A module's matrix, or these of its rows, with what an adapter adds."""
        change = self._changes.get(module)
        if change is None:
            return found
        up = change.up[slice(None) if rows is None else rows]  # an adapter's rows are in a checkpoint's order
        return StoredMatrix(
            found.shape, found.num_bytes, lambda part: found.read(part) + up[part] @ change.down * change.scale
        )

    def _by_head(self, name: str, own: StoredMatrix, latent: Latent) -> StoredMatrix:
        """What makes keys or values of a short row, where a file has both apart: of keys, each head is transposed."""
        heads, size, rank = self.decoder.num_heads, latent.plain, latent.rank
        is_turned = name.endswith(K_B)
        self._check_shape(name, own.shape, (heads * rank, size) if is_turned else (heads * latent.value_size, rank))
        if not is_turned:
            return own

        def read(part: slice | Indices) -> Rows:
            rows = np.arange(heads * size)[part]
            first, last = int(rows.min()) // size, int(rows.max()) // size + 1
            turned = own.read(slice(first * rank, last * rank)).reshape(-1, rank, size).swapaxes(1, 2)
            return turned.reshape(-1, rank)[rows - first * size]

        return StoredMatrix((heads * size, rank), own.num_bytes, read)

    def _in_fused(self, name: str, state: GatedDeltaNet) -> StoredMatrix:
        """A projection of a gated delta net that is in one matrix with another one."""
        _, part = layer_of(name)
        if (fused := rows_in_fused(part, state)) is None:
            raise self.missing(f"{name}.weight")
        module, count, rows = name.replace(part, fused[0]), *fused[1:]
        if (whole := self.stored(f"{module}.weight")) is None:
            raise self.missing(f"{name}.weight")
        self._check_shape(module, whole.shape, (count, state.width))
        return self._changed(module, whole).of_rows(rows)

    def _experts(self, name: str, count: int, shape: tuple[int, int]) -> StoredMatrix:
        """A matrix of all experts, one below the other: of one tensor, of one with gate and up, or of one for each."""
        found = self.stored(f"{name}.weight")
        whole = f"{name.rpartition('.')[0]}.gate_up_proj"
        if found is None and not name.endswith(".down_proj") and (both := self.stored(f"{whole}.weight")):
            self._check_shape(whole, both.shape, (2 * shape[0], shape[1]))
            rows = np.arange(2 * shape[0]).reshape(count, 2, -1)[:, int(name.endswith(".up_proj"))].reshape(-1)
            found = both.of_rows(rows)
        if found is None:
            found = self._of_each(name, count, shape)
        self._check_shape(name, found.shape, shape)
        return found

    def _taking_turns(self, name: str, shape: tuple[int, int]) -> StoredMatrix:
        """The matrices of gate and up in one, whose rows take turns; from one tensor, or from two."""
        found = self.stored(f"{name}.weight")
        if found is None:
            gate, up = (self.stored(f"{name.replace('gate_up', part)}.weight") for part in ("gate", "up"))
            if gate is None or up is None:
                raise self.missing(f"{name}.weight")
            for half in (gate, up):
                self._check_shape(name, half.shape, (shape[0] // 2, shape[1]))

            def read(part: slice | Indices) -> Rows:
                rows = np.arange(shape[0])[part]
                made = np.empty((len(rows), shape[1]), np.float32)
                for turn, half in enumerate((gate, up)):
                    mine = rows % 2 == turn
                    if mine.any():
                        made[mine] = half.read(rows[mine] // 2)
                return made

            found = StoredMatrix(shape, gate.num_bytes + up.num_bytes, read, gate.is_mxfp4 and up.is_mxfp4)
        self._check_shape(name, found.shape, shape)
        return found

    def bias_of_experts(self, name: str, experts: Experts) -> Rows:
        """The biases of all experts' matrices of a name, float32 [experts, 1, rows]."""
        _, part = layer_of(name)
        count = experts.shapes[part][0]
        if part == GATE_UP and self.vector(f"{name}.bias") is None:
            halves = [self.numbers(f"{name.replace('gate_up', half)}.bias", count // 2) for half in ("gate", "up")]
            found = np.stack(halves, -1)
        else:
            found = self.numbers(f"{name}.bias", count)
        return found.reshape(experts.count, 1, -1)

    def _of_each(self, name: str, count: int, shape: tuple[int, int]) -> StoredMatrix:
        """The matrices of experts that each have a tensor."""
        size, parts = shape[0] // count, []
        for number in range(count):
            module = self.decoder.arch.in_checkpoint(self.decoder.in_file(name)).format(number)
            part = self.stored(f"{module}.weight")
            if part is None:
                raise self.missing(f"{module}.weight")
            self._check_shape(module, part.shape, (size, shape[1]))
            parts.append(self._changed(module, part))
        return below_each_other(parts)

    def _check_shape(self, module: str, shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> None:
        if shape != tuple(size or found for size, found in zip(wanted, shape, strict=False)):
            raise ExportError(
                f"{module}.weight is {[*shape]} and has to be {[size or 'tokens' for size in wanted]} by the model's "
                "configuration. Download the model again."
            )

    def state_of(self, module: str) -> State | None:
        """What the layer of a module keeps instead of keys and values; None if it has attention, or is no layer."""
        layer = self._layer_of(module)
        return None if layer is None else layer.state

    def _layer_of(self, module: str) -> Layer | None:
        i, _ = layer_of(module)
        return None if i is None or i >= len(self.decoder.layers) else self.decoder.layers[i]

    def _shape_of(self, module: str) -> tuple[int | None, int]:
        """The rows and columns of a module's matrix by the configuration; None for as many rows as there are tokens."""
        decoder = self.decoder
        layer, (_, part) = self._layer_of(module), layer_of(module)
        sizes = (layer or decoder.layers[0]).sizes
        hidden, wide = decoder.hidden_size, sizes.mlp_size
        attended, keys = decoder.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
        queries = 2 * attended if decoder.arch.attention.gate == "queries" else attended
        gates = decoder.num_heads if decoder.arch.attention.gate == "heads" else attended
        inputs = 0 if decoder.layer_embedding is None else decoder.layer_embedding.width
        if decoder.streams is not None:
            of_streams = decoder.streams.shapes(hidden)
            if (name := part if part in of_streams else module) in of_streams:
                return of_streams[name]
        if layer is not None and layer.state is not None and part in layer.state.matrices:
            return layer.state.matrices[part]
        if layer is not None and layer.experts is not None and part == ROUTER:
            return layer.experts.count, hidden
        if decoder.latent is not None and part in (shapes := decoder.latent.shapes(hidden, decoder.num_heads)):
            return shapes[part]
        return {
            "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden),
            "o_proj": (hidden, attended), "output_gate": (gates, hidden), "qkv_proj": (queries + 2 * keys, hidden),
            "gate_proj": (wide, hidden), "up_proj": (wide, hidden),
            "gate_up_proj": (2 * wide, hidden), "down_proj": (hidden, wide), LAYER_GATE: (inputs, hidden),
            LAYER_PROJECTION: (hidden, inputs), "embed_tokens_per_layer": (None, inputs * len(decoder.layers)),
            "per_layer_model_projection": (inputs * len(decoder.layers), hidden),
        }.get(module.rsplit(".", 1)[-1], (None, hidden))  # fmt: skip

    def vector(self, name: str) -> Rows | None:
        """A norm or a bias, float32 [n], by its whole name; None if the file does not have it."""
        module, _, kind = name.rpartition(".")
        found = self._part(module, kind)
        if found is None:
            return None
        values = (self._changed(module, found) if kind == "weight" else found).read(slice(None)).reshape(-1)
        return values if module != HEAD or self.proposed is None else values[self.proposed]

    def numbers(self, name: str, count: int) -> Rows:
        """A tensor that has to be there, float32 [count], by its whole name.

        Raises:
            ExportError: when it is missing, or has another size.
        """
        found = self.numbers_if_any(name, count)
        if found is None:
            raise self.missing(name)
        return found

    def numbers_if_any(self, name: str, count: int) -> Rows | None:
        """The same, but None if the file does not have it."""
        found = self.vector(name)
        if found is not None and len(found) != count:
            raise ExportError(
                f"{name} has {len(found):,} numbers, and has to have {count:,} by the model's configuration. Download "
                "the model again."
            )
        return found

    def _part(self, name: str, kind: str) -> StoredMatrix | None:
        """The rows of a tensor that are this module's."""
        whole = self.stored(f"{place_of(name, self.decoder)[0]}.{kind}")
        rows = None if whole is None else self.rows_of(name, whole.shape[0])
        return whole if whole is None or rows is None else whole.of_rows(rows)

    def rows_of(self, name: str, count: int) -> Indices | None:
        """Which of a tensor's `count` rows are this module's, in its order; None for all as they are."""
        _, span = place_of(name, self.decoder)
        if self.decoder.latent is not None:
            return rows_in_checkpoint(layer_of(name)[1], self.decoder.latent, self.decoder.num_heads)[1]
        sizes = self.decoder.sizes
        heads = {"q_proj": self.decoder.num_heads, "k_proj": sizes.num_kv_heads}.get(name.rsplit(".", 1)[-1])
        order = halves_order(heads, sizes.head_size, self.decoder.rotary_size) if heads else None
        if not self._interleaved or order is None:
            return None if span is None else np.arange(count)[span]
        return np.arange(count)[span or slice(None)][order]


def flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's shape as a matrix: those of all experts are one below the other."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else shape


def _one_below_the_other(whole: StoredMatrix, count: int) -> StoredMatrix:
    """A matrix whose rows are `count` rows each."""
    shape = whole.shape[0] * count, whole.shape[1] // count

    def read(part: slice | Indices) -> Rows:
        rows = np.arange(shape[0])[part]
        first, last = int(rows[0]) // count, int(rows[-1]) // count + 1
        return whole.read(slice(first, last)).reshape(-1, shape[1])[rows - first * count]

    return StoredMatrix(shape, whole.num_bytes, read)


def place_of(name: str, decoder: Decoder) -> tuple[str, slice | None]:
    """The module that holds a projection, and which of its rows; None for all."""
    if decoder.latent is not None and (i := layer_of(name)[0]) is not None:
        return layer_name(i, rows_in_checkpoint(layer_of(name)[1], decoder.latent, decoder.num_heads)[0]), None
    layer, _, part = name.rpartition(".")
    sizes = decoder.sizes
    queries, keys = sizes.head_size * decoder.num_heads, sizes.head_size * sizes.num_kv_heads
    fused = {"q_proj": (0, queries), "k_proj": (queries, keys), "v_proj": (queries + keys, keys)}
    fused_mlp = {"gate_proj": (0, sizes.mlp_size), "up_proj": (sizes.mlp_size, sizes.mlp_size)}
    for is_fused, parts, module in (
        (decoder.arch.matrices.fused, fused, "qkv_proj"),
        (decoder.arch.matrices.fused_mlp, fused_mlp, "gate_up_proj"),
    ):
        if is_fused and part in parts:
            first, count = parts[part]
            return f"{layer}.{module}", slice(first, first + count)
    return name, None
