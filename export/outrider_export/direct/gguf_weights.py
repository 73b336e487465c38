"""The weights of a GGUF file, by the names of a checkpoint.

Source: names as llama.cpp's convert_hf_to_gguf.py writes them. Blocks of weights are unpacked by the package gguf.
"""

from __future__ import annotations

import gguf
import numpy as np
from gguf.quants import _type_traits as _UNPACKED  # noqa: N812 - the types that `gguf.dequantize` knows, by their number

from outrider.errors import ExportError
from outrider_export.direct.describe import Decoder
from outrider_export.direct.weights import EMBEDDING, FINAL_NORM, HEAD, Indices, Rows, Stored, Weights
from outrider_export.gguf_file import GGUFHeader

_MODULES = {EMBEDDING: "token_embd", FINAL_NORM: "output_norm", HEAD: "output"}
_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
}  # fmt: skip


class GGUFWeights(Weights):
    """The weights of a GGUF file."""

    def __init__(self, header: GGUFHeader, decoder: Decoder) -> None:
        super().__init__(decoder, interleaved=decoder.form.gguf_interleaved)
        self._header = header
        norms = decoder.form.norms
        self._parts = _PARTS | {
            norms.before_attention: "attn_norm", norms.after_attention: "post_attention_norm",
            norms.before_mlp: "ffn_norm", norms.after_mlp: "post_ffw_norm",
        }  # fmt: skip

    def stored(self, name: str) -> Stored | None:
        """See `Weights`."""
        module, _, kind = name.rpartition(".")
        if module in _MODULES:
            found = f"{_MODULES[module]}.{kind}"
        else:
            *_, layer, part = ["", "", *module.split(".", 3)][-2:]
            found = f"blk.{layer}.{self._parts.get(part)}.{kind}"
        return stored_in(self._header, found) if found in self._header.tensors else None

    def missing(self, name: str) -> ExportError:
        """See `Weights`."""
        return ExportError(f"{self._header.path} has no tensor for {name}. Fetch it again, or export the checkpoint.")


def stored_in(header: GGUFHeader, name: str) -> Stored:
    """A tensor that a file has.

    Raises:
        ExportError: when its type cannot be read.
    """
    tensor = header.tensors[name]
    kind = gguf.GGMLQuantizationType[tensor.type]
    if kind not in _UNPACKED and tensor.type not in ("F32", "F16"):
        raise ExportError(f"{header.path} stores {name} as {tensor.type}, which the package gguf does not unpack.")
    data = np.memmap(header.path, np.uint8, "r", header.data_start + tensor.offset, (tensor.num_bytes,))
    rows = data.reshape(tensor.shape[0], -1) if len(tensor.shape) > 1 else data.reshape(1, -1)

    def read(part: slice | Indices) -> Rows:
        found: Rows = gguf.dequantize(np.ascontiguousarray(rows[part]), kind).astype(np.float32, copy=False)
        return found

    def values(part: slice | Indices) -> Rows:
        return read(slice(None)).reshape(-1)[part]

    return Stored(tensor.shape, tensor.num_bytes, read if len(tensor.shape) > 1 else values)
