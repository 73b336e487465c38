"""The weights of a GGUF file, by the names of a checkpoint.

Source: as `gguf_names.toml`.
"""

from __future__ import annotations

import numpy as np

from outrider.errors import ExportError
from outrider_export.direct.decoder import Decoder
from outrider_export.direct.experts import (
    EXPERT_SCALES,
    ROUTER_SCALE,
)
from outrider_export.direct.states import GatedDeltaNet
from outrider_export.direct.streams import StreamPart
from outrider_export.direct.weights import (
    FINAL_NORM,
    Indices,
    Rows,
    StoredMatrix,
    Weights,
    flat,
)
from outrider_export.sources.gguf_file import GGUFHeader
from outrider_export.sources.gguf_names import to_gguf
from outrider_export.sources.gguf_values import blocks_of, check_type, unpack

_MODULES, _PARTS, _SHARED = to_gguf("decoder"), to_gguf("layer", "layer_of_some"), to_gguf("shared_expert")
_WHOLE = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "D": "ssm_d"}  # by the last part of a name
_SCALES = {ROUTER_SCALE: "ffn_gate_inp.scale", EXPERT_SCALES: "ffn_down_exps.scale"}  # whole names
# Those of all streams are in one tensor.
_OF_STREAMS: dict[str, str] = {StreamPart.BEGIN: "altup_proj.weight", StreamPart.END: "altup_unembd_proj.weight"}
_BY_KEY_HEAD = ("qwen3next",)  # whose heads of values have a checkpoint's order
# What llama.cpp calls the norm before the feed-forward part; elsewhere "ffn_norm".
_BEFORE_MLP = dict.fromkeys(
    ("qwen35", "qwen35moe", "qwen3next", "gpt-oss", "seed_oss", "glm4moe"), "post_attention_norm"
) | {"nemotron_h": "attn_norm"}
_NORM_OF_LFM2 = "token_embd_norm"  # what llama.cpp calls the norm before the output matrix there


class GGUFWeights(Weights):
    """The weights of a GGUF file."""

    def __init__(self, header: GGUFHeader, decoder: Decoder) -> None:
        super().__init__(decoder, interleaved=decoder.arch.matrices.gguf_interleaved)
        self._header = header
        norms = decoder.arch.norms
        self._parts = _PARTS | {
            norms.before_attention: "attn_norm", norms.after_attention: "post_attention_norm",
            norms.before_mlp: _BEFORE_MLP.get(decoder.arch.gguf, "ffn_norm"), norms.after_mlp: "post_ffw_norm",
        }  # fmt: skip
        self._has_shared = decoder.experts is not None and decoder.experts.shared not in ("", "beside")

    def stored(self, name: str) -> StoredMatrix | None:
        """See `Weights`."""
        name = self.decoder.in_file(name)
        module, _, kind = name.rpartition(".")
        group, _, number = module.rpartition(".")
        if group in _OF_STREAMS:
            return self._of_stream(_OF_STREAMS[group], int(number)) if kind == "weight" else None
        if module in _MODULES:
            found = f"{_MODULES[module]}.{kind}"
            if module == FINAL_NORM and found not in self._header.tensors:
                found = f"{_NORM_OF_LFM2}.{kind}"
        else:
            *_, layer, part = ["", "", *module.split(".", 3)][-2:]
            found = f"blk.{layer}.{_WHOLE.get(kind) or _SCALES.get(part) or f'{self._part_of(layer, part)}.{kind}'}"
        if found not in self._header.tensors:
            return None
        stored = stored_in(self._header, found)
        state = self.state_of(self.decoder.of_file(module))
        if isinstance(state, GatedDeltaNet) and self._header.architecture not in _BY_KEY_HEAD:
            stored = _by_key_head(stored, module.rsplit(".", 1)[-1], kind, state)
        return _logarithms(stored) if kind == "A_log" else stored

    def _of_stream(self, name: str, number: int) -> StoredMatrix | None:
        """One of the matrices in a tensor."""
        if name not in self._header.tensors:
            return None
        whole, size = stored_in(self._header, name), self.decoder.hidden_size
        return whole.of_rows(np.arange(whole.shape[0])[number * size : (number + 1) * size])

    def _part_of(self, layer: str, part: str) -> str | None:
        """What a file calls a part of a layer: of the shared expert where there are others, too."""
        if self._has_shared and part in _SHARED:
            number = int(layer) if self.decoder.blocks is None else self.decoder.blocks.layer(int(layer))
            if number is not None and self.decoder.layers[number].experts is not None:
                return _SHARED[part]
        return self._parts.get(part)

    def missing(self, name: str) -> ExportError:
        """See `Weights`."""
        return ExportError(f"{self._header.path} has no tensor for {name}. Fetch it again, or export the checkpoint.")


def _by_key_head(stored: StoredMatrix, part: str, kind: str, state: GatedDeltaNet) -> StoredMatrix:
    """A tensor of a gated delta net with the heads of values in a checkpoint's order.

    There, those of one head of keys stand together; llama.cpp has the first of each head of keys, then the second ones.
    """
    each = state.num_heads // state.num_key_heads
    heads = np.arange(state.num_heads).reshape(each, -1).T.reshape(-1)
    rows = (heads[:, None] * state.head_size + np.arange(state.head_size)).reshape(-1)
    if part == "out_proj":
        return StoredMatrix(stored.shape, stored.num_bytes, lambda chosen: stored.read(chosen)[:, rows])
    if part in ("in_proj_qkv", "conv1d"):
        before = 2 * state.key_width
        rows = np.concatenate([np.arange(before), before + rows])
    elif part in ("in_proj_a", "in_proj_b") or kind in _WHOLE:
        rows = heads
    elif part != "in_proj_z":
        return stored
    if stored.shape[0] != len(rows):
        return stored  # the reader says what is wrong
    return stored.of_rows(rows)


def _logarithms(stored: StoredMatrix) -> StoredMatrix:
    """The logarithms of rates, which llama.cpp stores as negative rates."""

    def read(part: slice | Indices) -> Rows:
        with np.errstate(all="ignore"):  # what is no number is found where it matters
            found: Rows = np.log(-stored.read(part))
        return found

    return StoredMatrix(stored.shape, stored.num_bytes, read)


def stored_in(header: GGUFHeader, name: str) -> StoredMatrix:
    """A tensor that a file has.

    Raises:
        ExportError: when its type cannot be read.
    """
    tensor = header.tensors[name]
    check_type(tensor, name)
    data = tensor.stored()
    rows = data.reshape(flat(tensor.shape)[0], -1) if len(tensor.shape) > 1 else data.reshape(1, -1)

    def read(part: slice | Indices) -> Rows:
        return unpack(tensor, rows[part])

    def values(part: slice | Indices) -> Rows:
        return read(slice(None)).reshape(-1)[part]

    of_rows = read if len(tensor.shape) > 1 else values
    blocks = (lambda part: blocks_of(tensor, rows[part])) if tensor.type == "Q4_K" else None
    return StoredMatrix(flat(tensor.shape), tensor.num_bytes, of_rows, tensor.type == "MXFP4", blocks)
