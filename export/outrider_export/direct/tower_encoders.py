"""Writes the graphs of vision towers with a projector, without PyTorch: SigLIP's, SigLIP 2's and Pixtral's.

Output: image_embeds float32 [1, tokens, hidden]. Inputs: pixel_values, and what the layouts of
`outrider.inputs.vision` say.

Source: Transformers 5.5, modeling_pixtral.py and modeling_mistral3.py; modeling_siglip.py and modeling_llava_next.py;
modeling_siglip2.py and modeling_lfm2_vl.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.models.backends.nodes import floats, integer, ints, transposed
from outrider_export.direct.vision_graph import VisionGraph, frequencies_of, rotated
from outrider_export.sources.safetensors import tensors_of

_TOWER, _PROJECTOR = "vision_tower", "multi_modal_projector"
NEWLINE = "image_newline"
_EPS = 1e-6
_EPS_OF_PIXTRAL = _EPS_OF_PROJECTOR = 1e-5  # which no configuration says
_THETA = 10_000.0


def tower_name(name: str) -> str:
    """The name here of a tensor of a checkpoint: newer ones have the parts in a `model`, and towers in towers."""
    if name.startswith("vpm."):  # MiniCPM-V's
        return f"{_TOWER}.{name[4:]}"
    return name.removeprefix("model.").replace(f"{_TOWER}.vision_model.", f"{_TOWER}.")


class _Tower(VisionGraph):
    """config: the checkpoint's config.json, with `vision_config` and `text_config`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], weights: str) -> None:
        tensors = {tower_name(name): tensor for name, tensor in tensors_of(folder).items()}
        vision = config["vision_config"]
        super().__init__(folder, tensors, vision, weights, int(vision["num_attention_heads"]))
        self.whole = config
        self.num_layers = int(vision["num_hidden_layers"])

    def projected(self, x: ov.Node, usual: str = "gelu") -> ov.Node:
        """What the projector makes of rows, [n, hidden]."""
        act = str(self.whole.get("projector_hidden_act", usual))
        return self.linear(f"{_PROJECTOR}.linear_2", self.activated(self.linear(f"{_PROJECTOR}.linear_1", x), act))


class PixtralEncoder(_Tower):
    """Of Mistral Small 3 and Ministral 3: patches of one image in its own form, token by token."""

    def model(self) -> ov.Model:
        """See `VisionGraph`."""
        positions = self.input("patch_positions", ov.Type.i64, (-1, 2))
        patch = self.numbers(f"{_TOWER}.patch_conv.weight").reshape(self.width, -1)
        pixels = self.input("pixel_values", ov.Type.f32, (-1, patch.shape[1]))
        stream = ops.matmul(pixels, floats(patch), False, True)
        stream = self.norm(f"{_TOWER}.ln_pre", stream, _EPS_OF_PIXTRAL)
        rope = self.config.get("rope_parameters") or self.config
        size = self.width // self.num_heads
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        frequencies = frequencies_of(float(rope.get("rope_theta", _THETA)), exponents)
        rotation = self.rotation(positions, np.stack([frequencies[::2], frequencies[1::2]]))
        for i in range(self.num_layers):
            stream = self._layer(f"{_TOWER}.transformer.layers.{i}", stream, rotation)
        merged = int(self.whole.get("spatial_merge_size", 2)) ** 2
        text: Mapping[str, Any] = self.whole["text_config"]
        eps = float(text.get("rms_norm_eps", 1e-5 if text.get("model_type") == "ministral3" else _EPS))
        stream = self.norm(f"{_PROJECTOR}.norm", stream, eps)
        # The numbers of a token's patches take turns in the matrix.
        merge = self.numbers(f"{_PROJECTOR}.patch_merger.merging_layer.weight")
        merge = merge.reshape(-1, self.width, merged).swapaxes(1, 2).reshape(-1, merged * self.width)
        stream = ops.reshape(stream, ints(-1, merged * self.width), special_zero=False)
        return self.finished(self.projected(ops.matmul(stream, self.matrix(merge), False, True)))

    def _layer(self, name: str, stream: ov.Node, rotation: tuple[ov.Node, ov.Node]) -> ov.Node:
        read = self.norm(f"{name}.attention_norm", stream, _EPS_OF_PIXTRAL)
        queries, keys, values = (self.in_heads(self.linear(f"{name}.attention.{part}_proj", read)) for part in "qkv")
        found = self.attended([rotated(queries, rotation), rotated(keys, rotation), values])
        stream = ops.add(stream, self.linear(f"{name}.attention.o_proj", found))
        read = self.norm(f"{name}.ffn_norm", stream, _EPS_OF_PIXTRAL)
        gate = self.activated(
            self.linear(f"{name}.feed_forward.gate_proj", read), self.config.get("hidden_act", "gelu")
        )
        made = ops.multiply(gate, self.linear(f"{name}.feed_forward.up_proj", read))
        return ops.add(stream, self.linear(f"{name}.feed_forward.down_proj", made))


class SiglipTower(_Tower):
    """The layers of SigLIP's encoders, both."""

    def layer(self, i: int, stream: ov.Node, num_rows: int | None, *, within: bool = False) -> ov.Node:
        """One layer. num_rows, within: see `VisionGraph.attended`."""
        name, eps = f"{_TOWER}.encoder.layers.{i}", self.eps
        read = self.norm(f"{name}.layer_norm1", stream, eps)
        stream = ops.add(stream, self.attention(name, read, num_rows, within=within))
        read = self.linear(f"{name}.mlp.fc1", self.norm(f"{name}.layer_norm2", stream, eps))
        made = self.activated(read, self.config.get("hidden_act", "gelu_pytorch_tanh"))
        return ops.add(stream, self.linear(f"{name}.mlp.fc2", made))

    def attention(self, name: str, read: ov.Node, num_rows: int | None, *, within: bool = False) -> ov.Node:
        """What the rows of a layer find."""
        parts = [self.in_heads(self.linear(f"{name}.self_attn.{part}_proj", read)) for part in "qkv"]
        return self.linear(f"{name}.self_attn.out_proj", self.attended(parts, num_rows, within=within))

    def embedded(self, rows: ov.Node | None = None) -> ov.Node:
        """The embeddings of patches, [n, width], without their positions. rows: of pixels; None for an input."""
        name = f"{_TOWER}.embeddings.patch_embedding"
        matrix = self.numbers(f"{name}.weight").reshape(self.width, -1)
        rows = self.input("pixel_values", ov.Type.f32, (-1, matrix.shape[1])) if rows is None else rows
        return self.biased(name, ops.matmul(rows, floats(matrix), False, True))

    def patches(self, pixels: ov.Node, side: int, patch: int) -> ov.Node:
        """The embeddings of the patches of square tiles, [n, width]. pixels: float32 [tiles, 3, size, size]."""
        # SigLIP 2's patches of 14 do not fill 384 pixels: the last ones are not read.
        cropped = ops.slice(pixels, ints(0, 0), ints(side * patch, side * patch), ints(1, 1), ints(2, 3))
        apart = ops.reshape(cropped, ints(-1, 3, side, patch, side, patch), special_zero=False)
        apart = transposed(apart, 0, 2, 4, 1, 3, 5)
        stream = self.embedded(ops.reshape(apart, ints(-1, 3 * patch * patch), special_zero=False))
        learned = floats(self.numbers(f"{_TOWER}.embeddings.position_embedding.weight")[None])
        stream = ops.add(ops.reshape(stream, ints(-1, side * side, self.width), special_zero=False), learned)
        return ops.reshape(stream, ints(-1, self.width), special_zero=False)

    @property
    def eps(self) -> float:
        """Of its norms."""
        return float(self.config.get("layer_norm_eps", _EPS))


class LlavaNextEncoder(SiglipTower):
    """Of Granite Vision: square tiles, whose tokens are put in the order that the input `places` says."""

    def model(self) -> ov.Model:
        """See `VisionGraph`."""
        edge, patch = int(self.config["image_size"]), int(self.config["patch_size"])
        side = edge // patch
        pixels = self.input("pixel_values", ov.Type.f32, (-1, 3, edge, edge))
        places = self.input("places", ov.Type.i64, (-1,))
        states = [self.patches(pixels, side, patch)]
        found = self.whole.get("vision_feature_layer", -2)
        chosen = [range(self.num_layers + 1)[i] for i in (found if isinstance(found, list) else [found])]
        for i in range(max(chosen)):
            states.append(self.layer(i, states[-1], side * side))
        features = ops.concat([states[i] for i in chosen], 1) if len(chosen) > 1 else states[chosen[0]]
        embeds = ops.concat([self.projected(features), floats(self.numbers(NEWLINE)[None])], 0)
        embeds = ops.gather(embeds, places, integer(0))
        scale = float(self.whole["text_config"].get("embedding_multiplier", 1.0))  # Granite's, of images, too
        return self.finished(embeds if scale == 1 else ops.multiply(embeds, floats([[scale]])))


class Lfm2Encoder(SiglipTower):
    """Of LFM2-VL: patches of one image's parts, token by token; those of a part attend to each other."""

    def model(self) -> ov.Model:
        """See `VisionGraph`."""
        stream = self.embedded()
        learned = self.numbers(f"{_TOWER}.embeddings.position_embedding.weight")
        side = int(len(learned) ** 0.5)
        down, along = (self.input(f"{name}_weights", ov.Type.f32, (-1, side)) for name in ("down", "along"))
        both = ops.multiply(ops.unsqueeze(down, ints(2)), ops.unsqueeze(along, ints(1)))  # [n, side, side]
        both = ops.reshape(both, ints(-1, side * side), special_zero=False)
        stream = ops.add(stream, ops.matmul(both, floats(learned), False, False))
        self.add_windows()
        for i in range(self.num_layers):
            stream = self.layer(i, stream, None, within=True)
        stream = self.norm(f"{_TOWER}.post_layernorm", stream, self.eps)
        merged = int(self.whole.get("downsample_factor", 2)) ** 2
        stream = ops.reshape(stream, ints(-1, merged * self.width), special_zero=False)
        if self.whole.get("projector_use_layernorm", True):
            stream = self.norm(f"{_PROJECTOR}.layer_norm", stream, _EPS_OF_PROJECTOR)
        return self.finished(self.projected(stream))
