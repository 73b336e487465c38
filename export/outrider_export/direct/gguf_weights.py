"""The weights of a GGUF file, by the names of a checkpoint.

Source: names as llama.cpp's convert_hf_to_gguf.py writes them. Blocks of weights are unpacked by the package gguf.
"""

from __future__ import annotations

import gguf
import numpy as np
from gguf.quants import _type_traits as _UNPACKED  # noqa: N812 - the types that `gguf.dequantize` knows, by their number

from outrider.errors import ExportError
from outrider_export.direct.describe import Decoder
from outrider_export.direct.experts import CHOICE, DOWN, GATE, ROUTER, UP
from outrider_export.direct.weights import EMBEDDING, FINAL_NORM, HEAD, Indices, Rows, Stored, Weights, flat
from outrider_export.gguf_file import GGUFHeader, TensorInfo

_MODULES = {EMBEDDING: "token_embd", FINAL_NORM: "output_norm", HEAD: "output"}
_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up", "conv.conv": "shortconv.conv",
    ROUTER: "ffn_gate_inp", CHOICE: "exp_probs_b", GATE: "ffn_gate_exps", UP: "ffn_up_exps", DOWN: "ffn_down_exps",
    "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
}  # fmt: skip

_NORM_OF_LFM2 = "token_embd_norm"  # what llama.cpp calls the norm before the output matrix there


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
            if module == FINAL_NORM and found not in self._header.tensors:
                found = f"{_NORM_OF_LFM2}.{kind}"
        else:
            *_, layer, part = ["", "", *module.split(".", 3)][-2:]
            found = f"blk.{layer}.{self._parts.get(part)}.{kind}"
        tensor = self._header.tensors.get(found)
        return None if tensor is None else _stored(self._header, found, tensor)

    def missing(self, name: str) -> ExportError:
        """See `Weights`."""
        return ExportError(f"{self._header.path} has no tensor for {name}. Fetch it again, or export the checkpoint.")


def _stored(header: GGUFHeader, name: str, tensor: TensorInfo) -> Stored:
    kind = gguf.GGMLQuantizationType[tensor.type]
    if kind not in _UNPACKED and tensor.type not in ("F32", "F16"):
        raise ExportError(f"{header.path} stores {name} as {tensor.type}, which the package gguf does not unpack.")
    data = np.memmap(header.path, np.uint8, "r", header.data_start + tensor.offset, (tensor.num_bytes,))
    rows = data.reshape(flat(tensor.shape)[0], -1) if len(tensor.shape) > 1 else data.reshape(1, -1)

    def read(part: slice | Indices) -> Rows:
        found: Rows = gguf.dequantize(np.ascontiguousarray(rows[part]), kind).astype(np.float32, copy=False)
        return found

    def values(part: slice | Indices) -> Rows:
        return read(slice(None)).reshape(-1)[part]

    return Stored(flat(tensor.shape), tensor.num_bytes, read if len(tensor.shape) > 1 else values)
