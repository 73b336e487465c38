"""Writes the graph of Qwen's vision encoders, without PyTorch.

Inputs, for n patches of one image: pixel_values float32 [n, values], patch_positions int64 [n, 2], and what
`outrider.inputs.vision.qwen.inputs_of` says of windows and learned positions. Output: image_embeds float32
[1, n / patches of a token, parts · hidden].

Source: Transformers 5.5, modeling_qwen2_vl.py, modeling_qwen2_5_vl.py, modeling_qwen3_vl.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.models.backends.nodes import floats, integer, ints
from outrider_export.direct.vision_graph import VisionGraph, frequencies_of, rotated
from outrider_export.sources.safetensors import Tensor, tensors_of

# How names of its tensors begin; the last one in what Transformers 5.5 saves of Qwen3.5.
OF_VISION = ("model.visual.", "visual.", "model.language_model.visual.")
_EPS = 1e-6
_THETA = 10_000.0


class QwenEncoder(VisionGraph):
    """See the module. config: the checkpoint's config.json."""

    def __init__(self, folder: Path, config: Mapping[str, Any], weights: str) -> None:
        tensors: dict[str, Tensor] = {}
        for name, tensor in tensors_of(folder).items():
            for prefix in OF_VISION:
                if name.startswith(prefix):
                    tensors[name.removeprefix(prefix)] = tensor
        config = config["vision_config"]
        super().__init__(folder, tensors, config, weights, int(config.get("num_heads", 16)))
        self.merged = int(config.get("spatial_merge_size", 2)) ** 2
        positions = self.input("patch_positions", ov.Type.i64, (-1, 2))
        half = self.width // self.num_heads // 2
        exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
        self.rotated_by = self.rotation(positions, np.stack([frequencies_of(_THETA, exponents)] * 2))
        self.full = set(config["fullatt_block_indexes"]) if "fullatt_block_indexes" in config else None
        if self.full is not None:
            self.add_windows()

    def model(self) -> ov.Model:
        """See `VisionGraph`."""
        patch = self.numbers("patch_embed.proj.weight").reshape(self.width, -1)
        pixels = self.input("pixel_values", ov.Type.f32, (-1, patch.shape[1]))
        stream = self.biased("patch_embed.proj", ops.matmul(pixels, floats(patch), False, True))
        if "pos_embed.weight" in self.tensors:
            corners = self.input("corners", ov.Type.i64, (-1, 4))
            weights = self.input("corner_weights", ov.Type.f32, (-1, 4))
            found = ops.gather(floats(self.numbers("pos_embed.weight")), corners, integer(0))
            found = ops.multiply(found, ops.unsqueeze(weights, ints(2)))
            stream = ops.add(stream, ops.reduce_sum(found, ints(1), False))
        further = list(self.config.get("deepstack_visual_indexes") or ())
        added = {}
        for i in range(int(self.config["depth"])):
            stream = self._block(i, stream)
            if i in further:
                j = further.index(i)
                added[j] = self._merge(f"deepstack_merger_list.{j}", stream, norm_after=True)
        parts = [self._merge("merger", stream), *(added[j] for j in sorted(added))]
        return self.finished(ops.concat(parts, 1) if len(parts) > 1 else parts[0])

    def _block(self, i: int, stream: ov.Node) -> ov.Node:
        name = f"blocks.{i}"
        stream = ops.add(stream, self._attention(i, self.norm(f"{name}.norm1", stream, _EPS)))
        read = self.norm(f"{name}.norm2", stream, _EPS)
        if f"{name}.mlp.gate_proj.weight" in self.tensors:
            gate = self._activated(self.linear(f"{name}.mlp.gate_proj", read))
            made = ops.multiply(gate, self.linear(f"{name}.mlp.up_proj", read))
            return ops.add(stream, self.linear(f"{name}.mlp.down_proj", made))
        first, second = (
            ("linear_fc1", "linear_fc2") if f"{name}.mlp.linear_fc1.weight" in self.tensors else ("fc1", "fc2")
        )
        made = self._activated(self.linear(f"{name}.mlp.{first}", read))
        return ops.add(stream, self.linear(f"{name}.mlp.{second}", made))

    def _attention(self, i: int, x: ov.Node) -> ov.Node:
        made = ops.reshape(
            self.linear(f"blocks.{i}.attn.qkv", x),
            ints(-1, 3, self.num_heads, self.width // self.num_heads),
            special_zero=False,
        )
        queries, keys, values = (ops.gather(made, integer(part), integer(1)) for part in range(3))  # [n, heads, size]
        parts = [rotated(queries, self.rotated_by), rotated(keys, self.rotated_by), values]
        found = self.attended(parts, within=self.full is not None and i not in self.full)
        return self.linear(f"blocks.{i}.attn.proj", found)

    def _merge(self, name: str, stream: ov.Node, *, norm_after: bool = False) -> ov.Node:
        """The embeddings of tokens, [n / patches of a token, hidden]. norm_after: of a token's patches together."""
        is_new = f"{name}.norm.weight" in self.tensors
        norm = f"{name}.norm" if is_new else f"{name}.ln_q"
        first, second = ("linear_fc1", "linear_fc2") if is_new else ("mlp.0", "mlp.2")
        x = stream if norm_after else self.norm(norm, stream, _EPS)
        x = ops.reshape(x, ints(-1, self.merged * self.width), special_zero=False)
        x = self.norm(norm, x, _EPS) if norm_after else x
        return self.linear(f"{name}.{second}", ops.gelu(self.linear(f"{name}.{first}", x), "ERF"))

    def _activated(self, x: ov.Node) -> ov.Node:
        usual = "quick_gelu" if "embed_dim" in self.config else "gelu_pytorch_tanh" if self.full is None else "silu"
        return self.activated(x, self.config.get("hidden_act", usual))
