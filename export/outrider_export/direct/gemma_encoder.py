"""The graphs of Gemma's vision encoders; see `vision_encoder.write_encoder`.

Gemma 3: pixel_values float32 [n, 3, size, size] → image_embeds float32 [n, tokens, hidden]. Gemma 4: pixel_values
float32 [n, patch² · 3] of one image, tile by tile, and patch_positions int64 [n, 2] → image_embeds float32
[1, n / patches of a tile, hidden].

Source: Transformers 5.5, modeling_siglip.py, modeling_gemma3.py, modeling_gemma4.py; Transformers 5.24,
modeling_gemma4_unified.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.errors import ExportError
from outrider.models.backends.nodes import floats, integer, ints, result
from outrider_export.direct.nodes import rms_norm
from outrider_export.direct.tower_encoders import SiglipTower
from outrider_export.direct.vision_graph import VisionGraph, frequencies_of, rotated
from outrider_export.sources.safetensors import Tensor, tensors_of

_THETA = 100.0
_EPS_OF_EMBEDDER = 1e-5  # which no configuration says
_PREFIXES = ("vision_tower.", "embed_vision.", "vision_embedder.")  # of Gemma 4's tensors


class Gemma3Encoder(SiglipTower):
    """Square images, whose patches are averaged to tokens."""

    def model(self) -> ov.Model:
        """See `VisionGraph`."""
        size, patch = int(self.config["image_size"]), int(self.config["patch_size"])
        side, count = size // patch, isqrt(int(self.whole.get("mm_tokens_per_image", 256)))
        pixels = self.input("pixel_values", ov.Type.f32, (-1, 3, size, size))
        stream = self.patches(pixels, side, patch)
        for i in range(self.num_layers):
            stream = self.layer(i, stream, side * side)
        stream = self.norm("vision_tower.post_layernorm", stream, self.eps)
        squares = ints(-1, count, side // count, count, side // count, self.width)
        pooled = ops.reduce_mean(ops.reshape(stream, squares, special_zero=False), ints(2, 4), False)
        tokens = ops.reshape(pooled, ints(-1, count * count, self.width), special_zero=False)
        projector = "multi_modal_projector.mm"
        normed = rms_norm(tokens, 1 + self.numbers(f"{projector}_soft_emb_norm.weight"), self.eps)
        matrix = np.ascontiguousarray(self.numbers(f"{projector}_input_projection_weight").T)
        embeds = ops.matmul(normed, self.matrix(matrix), False, True)
        return ov.Model([result("image_embeds", embeds)], self.inputs, "vision")


def gemma4_encoder(folder: Path, config: Mapping[str, Any], weights: str) -> VisionGraph:
    """The graph of a Gemma 4, which has an encoder or is without one."""
    tensors = {}
    for name, tensor in tensors_of(folder).items():
        name = name.removeprefix("model.")
        if prefix := next((each for each in _PREFIXES if name.startswith(each)), ""):
            tensors[name.removeprefix(prefix)] = tensor
    vision = config["vision_config"]
    if "mm_embed_dim" in vision:
        return Gemma4Embedder(folder, tensors, vision | {"hidden_size": vision["mm_embed_dim"]}, weights, 1)
    return Gemma4Encoder(folder, tensors, vision, weights)


class Gemma4Embedder(VisionGraph):
    """Of the 12B (`gemma4_unified`): a tile of pixels becomes a token without looking at others."""

    def model(self) -> ov.Model:
        """See `VisionGraph`."""
        positions = self.input("patch_positions", ov.Type.i64, (-1, 2))
        values = self.numbers("patch_dense.weight").shape[1]
        stream = self.norm("patch_ln1", self.input("pixel_values", ov.Type.f32, (-1, values)), _EPS_OF_EMBEDDER)
        stream = self.norm("patch_ln2", self.linear("patch_dense", stream), _EPS_OF_EMBEDDER)
        table = self.numbers("pos_embedding")  # [positions, 2, width]: of columns, and of rows
        for part, axis in ((0, 1), (1, 0)):
            at = ops.squeeze(ops.gather(positions, ints(axis), integer(1)), ints(1))
            learned = floats(np.ascontiguousarray(table[:, part]))
            stream = ops.add(stream, ops.gather(learned, at, integer(0)))
        stream = self.norm("pos_norm", stream, _EPS_OF_EMBEDDER)
        normed = rms_norm(stream, None, float(self.config.get("rms_norm_eps", 1e-6)))
        return self.finished(self.linear("embedding_projection", normed))


class Gemma4Encoder(VisionGraph):
    """Patches of one image in its own form, tile by tile; layers have norms around their parts."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], vision: Mapping[str, Any], weights: str) -> None:
        heads = int(vision["num_attention_heads"])
        super().__init__(folder, tensors, vision, weights, heads)
        self.eps = float(vision.get("rms_norm_eps", 1e-6))
        size = int(vision.get("head_dim") or self.width // heads)
        if int(vision.get("num_key_value_heads", heads)) != heads or size * heads != self.width:
            raise ExportError(f"{folder} has a vision encoder whose heads are of another size, or share keys.")
        theta = float((vision.get("rope_parameters") or {}).get("rope_theta", _THETA))
        self.frequencies = frequencies_of(theta, np.arange(0, size // 2, 2) / np.float32(size // 2))
        self.activation = str(vision.get("hidden_activation", "gelu_pytorch_tanh"))

    def model(self) -> ov.Model:
        """See `VisionGraph`."""
        positions = self.input("patch_positions", ov.Type.i64, (-1, 2))
        axes = [ops.gather(positions, ints(i), integer(1)) for i in (1, 0)]  # [n, 1]: column, row
        matrix = self.numbers("patch_embedder.input_proj.weight")
        pixels = self.input("pixel_values", ov.Type.f32, (-1, matrix.shape[1]))
        centred = ops.multiply(ops.subtract(pixels, floats([[0.5]])), floats([[2]]))
        stream = ops.matmul(centred, floats(matrix), False, True)
        table = self.numbers("patch_embedder.position_embedding_table")
        learned = [
            ops.gather(floats(part), ops.squeeze(axis, ints(1)), integer(0))
            for part, axis in zip(table, axes, strict=True)
        ]
        stream = ops.add(stream, ops.add(*learned))
        rotations = [self.rotation(axis, self.frequencies[None]) for axis in axes]
        for i in range(int(self.config["num_hidden_layers"])):
            stream = self._layer(f"encoder.layers.{i}", stream, rotations)
        patches = int(self.config.get("pooling_kernel_size", 3)) ** 2
        tokens = ops.reduce_mean(ops.reshape(stream, ints(-1, patches, self.width), special_zero=False), ints(1), False)
        tokens = ops.multiply(tokens, floats([[self.width**0.5]]))
        if self.config.get("standardize"):
            bias, scale = (floats(self.numbers(f"std_{name}")[None]) for name in ("bias", "scale"))
            tokens = ops.multiply(ops.subtract(tokens, bias), scale)
        return self.finished(self.linear("embedding_projection", rms_norm(tokens, None, self.eps)))

    def _layer(self, name: str, stream: ov.Node, rotations: list[tuple[ov.Node, ov.Node]]) -> ov.Node:
        read = self.norm(f"{name}.input_layernorm", stream, self.eps)
        parts = [self.in_heads(self._clipped(f"{name}.self_attn.{part}_proj", read)) for part in "qkv"]
        placed = [
            self._placed(self.norm(f"{name}.self_attn.{part}_norm", x, self.eps), rotations)
            for part, x in zip("qk", parts, strict=False)
        ]
        found = self.attended([*placed, rms_norm(parts[2], None, self.eps)], scale=1.0)
        found = self._clipped(f"{name}.self_attn.o_proj", found)
        stream = ops.add(stream, self.norm(f"{name}.post_attention_layernorm", found, self.eps))
        read = self.norm(f"{name}.pre_feedforward_layernorm", stream, self.eps)
        gate = self.activated(self._clipped(f"{name}.mlp.gate_proj", read), self.activation)
        made = ops.multiply(gate, self._clipped(f"{name}.mlp.up_proj", read))
        fed = self._clipped(f"{name}.mlp.down_proj", made)
        return ops.add(stream, self.norm(f"{name}.post_feedforward_layernorm", fed, self.eps))

    def _placed(self, x: ov.Node, rotations: list[tuple[ov.Node, ov.Node]]) -> ov.Node:
        """Queries or keys [n, heads, size]: one half rotated by the column, and the other by the row."""
        halves = ops.split(x, integer(2), 2).outputs()
        return ops.concat([rotated(half, each) for half, each in zip(halves, rotations, strict=True)], 2)

    def _clipped(self, name: str, x: ov.Node) -> ov.Node:
        """A product whose input and output have limits, if the checkpoint has them."""
        return self._limited(f"{name}.output", self.linear(f"{name}.linear", self._limited(f"{name}.input", x)))

    def _limited(self, name: str, x: ov.Node) -> ov.Node:
        if f"{name}_min" not in self.tensors:
            return x
        least, most = (floats(self.numbers(f"{name}_{end}").reshape(1, 1)) for end in ("min", "max"))
        return ops.minimum(ops.maximum(x, least), most)
