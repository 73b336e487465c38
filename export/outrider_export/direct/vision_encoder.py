"""Writes the graph of Qwen's vision encoders, without PyTorch.

    write_encoder(folder, output, "int8")

Inputs, for n patches of one image: pixel_values float32 [n, values], patch_positions int64 [n, 2], and what
`outrider.inputs.vision.grids.inputs_of` says of windows and learned positions. Output: image_embeds float32
[1, n / patches of a token, parts · hidden].

Source: Transformers 5.5, modeling_qwen2_vl.py, modeling_qwen2_5_vl.py, modeling_qwen3_vl.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino.utils.node_factory import NodeFactory

from outrider.errors import ExportError
from outrider.models.backends.taps import ints, parameter, result
from outrider_export.direct.codes import rounded
from outrider_export.direct.norms import floats, rms_norm
from outrider_export.sources.safetensors import Tensor, tensors_of
from outrider_export.sources.source import AGAIN

# How names of its tensors begin; the last one in what Transformers 5.5 saves of Qwen3.5.
OF_VISION = ("model.visual.", "visual.", "model.language_model.visual.")
_EPS = 1e-6
_THETA = 10_000.0
_CODES = 255  # the largest, of 8 bits


def write_encoder(folder: Path, config: Mapping[str, Any], output: Path, weights: str) -> None:
    """Write a checkpoint's vision encoder. config: its vision_config. output: a new folder. weights: the main model's.

    Raises:
        ExportError: when a tensor is missing.
    """
    model = _Encoder(folder, config, weights).model()
    output.mkdir(parents=True)
    ov.save_model(model, output / "openvino_model.xml", compress_to_fp16=False)


class _Encoder:
    def __init__(self, folder: Path, config: Mapping[str, Any], weights: str) -> None:
        self.folder, self.config, self.weights = folder, config, weights
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in tensors_of(folder).items():
            for prefix in OF_VISION:
                if name.startswith(prefix):
                    self.tensors[name.removeprefix(prefix)] = tensor
        self.width = int(config.get("embed_dim") or config["hidden_size"])
        self.heads = int(config.get("num_heads", 16))
        self.merged = int(config.get("spatial_merge_size", 2)) ** 2
        self.positions = parameter("patch_positions", ov.Type.i64, (-1, 2))
        self.inputs = [self.positions]
        self.rotation = self._rotation()
        self.full = set(config["fullatt_block_indexes"]) if "fullatt_block_indexes" in config else None
        if self.full is not None:
            self.members = self._input("window_members", ov.Type.i64, (-1, -1))
            self.mask = self._input("window_mask", ov.Type.f32, (-1, 1, 1, -1))
            self.places = self._input("window_places", ov.Type.i64, (-1,))

    def model(self) -> ov.Model:
        patch = self._numbers("patch_embed.proj.weight").reshape(self.width, -1)
        pixels = self._input("pixel_values", ov.Type.f32, (-1, patch.shape[1]))
        stream = self._biased("patch_embed.proj", ops.matmul(pixels, floats(patch), False, True))
        if "pos_embed.weight" in self.tensors:
            corners = self._input("corners", ov.Type.i64, (-1, 4))
            weights = self._input("corner_weights", ov.Type.f32, (-1, 4))
            found = ops.gather(floats(self._numbers("pos_embed.weight")), corners, ops.constant(np.int64(0)))
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
        embeds = ops.unsqueeze(ops.concat(parts, 1) if len(parts) > 1 else parts[0], ints(0))
        return ov.Model([result("image_embeds", embeds)], self.inputs, "vision")

    def _block(self, i: int, stream: ov.Node) -> ov.Node:
        name = f"blocks.{i}"
        stream = ops.add(stream, self._attention(i, self._norm(f"{name}.norm1", stream)))
        read = self._norm(f"{name}.norm2", stream)
        if f"{name}.mlp.gate_proj.weight" in self.tensors:
            gate = self._activated(self._linear(f"{name}.mlp.gate_proj", read))
            made = ops.multiply(gate, self._linear(f"{name}.mlp.up_proj", read))
            return ops.add(stream, self._linear(f"{name}.mlp.down_proj", made))
        first, second = (
            ("linear_fc1", "linear_fc2") if f"{name}.mlp.linear_fc1.weight" in self.tensors else ("fc1", "fc2")
        )
        made = self._activated(self._linear(f"{name}.mlp.{first}", read))
        return ops.add(stream, self._linear(f"{name}.mlp.{second}", made))

    def _attention(self, i: int, x: ov.Node) -> ov.Node:
        size = self.width // self.heads
        made = ops.reshape(self._linear(f"blocks.{i}.attn.qkv", x), ints(-1, 3, self.heads, size), special_zero=False)
        queries, keys, values = (
            ops.gather(made, ops.constant(np.int64(part)), ops.constant(np.int64(1))) for part in range(3)
        )  # [n, heads, size]
        parts = [self._rotated(queries), self._rotated(keys), values]
        scale = ops.constant(np.float32(size**-0.5))
        order = ops.constant(np.array([0, 2, 1, 3], np.int32))
        within = self.full is not None and i not in self.full
        batched = [
            ops.gather(each, self.members, ops.constant(np.int64(0))) if within else ops.unsqueeze(each, ints(0))
            for each in parts
        ]
        turned = [ops.transpose(each, order) for each in batched]  # [windows, heads, n, size]
        mask = self.mask if within else floats(np.zeros((1, 1, 1, 1)))
        found = ops.transpose(ops.scaled_dot_product_attention(*turned, mask, scale), order)
        found = ops.reshape(found, ints(-1, self.width), special_zero=False)
        if within:
            found = ops.gather(found, self.places, ops.constant(np.int64(0)))
        return self._linear(f"blocks.{i}.attn.proj", found)

    def _rotation(self) -> tuple[ov.Node, ov.Node]:
        """Cosines and sines, float32 [n, 1, size of a head]: of rows in one half, and of columns in the other."""
        half = self.width // self.heads // 2
        frequencies = 1 / np.float32(_THETA) ** (np.arange(0, half, 2, dtype=np.float32) / np.float32(half))
        positions = ops.convert(ops.unsqueeze(self.positions, ints(2)), "f32")
        angles = ops.multiply(positions, floats(frequencies.reshape(1, 1, -1)))
        angles = ops.reshape(angles, ints(-1, 1, half), special_zero=False)
        angles = ops.concat([angles, angles], 2)
        return ops.cos(angles), ops.sin(angles)

    def _rotated(self, x: ov.Node) -> ov.Node:
        first, second = ops.split(x, ops.constant(np.int64(2)), 2).outputs()
        turned = ops.concat([ops.multiply(second, floats([[[-1]]])), first], 2)
        cosines, sines = self.rotation
        return ops.add(ops.multiply(x, cosines), ops.multiply(turned, sines))

    def _merge(self, name: str, stream: ov.Node, *, norm_after: bool = False) -> ov.Node:
        """The embeddings of tokens, [n / patches of a token, hidden]. norm_after: of a token's patches together."""
        is_new = f"{name}.norm.weight" in self.tensors
        norm = f"{name}.norm" if is_new else f"{name}.ln_q"
        first, second = ("linear_fc1", "linear_fc2") if is_new else ("mlp.0", "mlp.2")
        x = stream if norm_after else self._norm(norm, stream)
        x = ops.reshape(x, ints(-1, self.merged * self.width), special_zero=False)
        x = self._norm(norm, x) if norm_after else x
        return self._linear(f"{name}.{second}", ops.gelu(self._linear(f"{name}.{first}", x), "ERF"))

    def _norm(self, name: str, x: ov.Node) -> ov.Node:
        weight = self._numbers(f"{name}.weight")
        if f"{name}.bias" not in self.tensors:
            return rms_norm(x, weight, _EPS)
        normed = ops.mvn(x, ints(-1), True, _EPS, "INSIDE_SQRT")
        return ops.add(ops.multiply(normed, floats(weight[None])), floats(self._numbers(f"{name}.bias")[None]))

    def _activated(self, x: ov.Node) -> ov.Node:
        usual = "quick_gelu" if "embed_dim" in self.config else "gelu_pytorch_tanh" if self.full is None else "silu"
        kind = self.config.get("hidden_act", usual)
        if kind == "quick_gelu":
            return ops.multiply(x, ops.sigmoid(ops.multiply(x, floats([[1.702]]))))
        if kind == "silu":
            return NodeFactory("opset4").create("Swish", [x.output(0)], {})
        if kind in ("gelu", "gelu_pytorch_tanh"):
            return ops.gelu(x, "ERF" if kind == "gelu" else "TANH")
        raise ExportError(f"{self.folder} has a vision encoder with the activation {kind!r}, which is not known.")

    def _linear(self, name: str, x: ov.Node) -> ov.Node:
        return self._biased(name, ops.matmul(x, self._matrix(self._numbers(f"{name}.weight")), False, True))

    def _biased(self, name: str, x: ov.Node) -> ov.Node:
        if f"{name}.bias" not in self.tensors:
            return x
        return ops.add(x, floats(self._numbers(f"{name}.bias")[None]))

    def _matrix(self, values: NDArray[np.float32]) -> ov.Node:
        if self.weights == "fp32":
            return ops.constant(values)
        if self.weights == "fp16":
            return ops.convert(ops.constant(values.astype(np.float16)), "f32")
        codes, zero_points, scales = rounded(values, values.shape[1], _CODES)
        centred = ops.subtract(ops.convert(ops.constant(codes), "f16"), ops.convert(ops.constant(zero_points), "f16"))
        return ops.convert(ops.multiply(centred, ops.constant(scales)), "f32")

    def _numbers(self, name: str) -> NDArray[np.float32]:
        if name not in self.tensors:
            raise ExportError(f"{self.folder} has no {OF_VISION[0]}{name}. {AGAIN}")
        found: NDArray[np.float32] = self.tensors[name].numbers()
        return found

    def _input(self, name: str, kind: ov.Type, shape: tuple[int, ...]) -> Any:
        made = parameter(name, kind, shape)
        self.inputs.append(made)
        return made
