"""Writes the graphs of MiniCPM-V's vision encoders, without PyTorch: SigLIP's layers, and what makes tokens of patches.

Inputs: pixel_values float32 [n, 3 · patch²] of an image's parts, and what `outrider.inputs.vision.minicpm` says.
Output: image_embeds float32 [1, tokens, hidden].

Source: MiniCPM-V 2.6 to 4.5's modeling_navit_siglip.py and resampler.py; Transformers 5.24, modeling_minicpmv4_6.py.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.models.backends.nodes import floats, integer, ints, transposed
from outrider_export.direct.tower_encoders import SiglipTower
from outrider_export.direct.vision_graph import frequencies_of

_TOWER, _RESAMPLER, _MERGER = "vision_tower", "resampler", "merger.mlp.0"
_HEAD = 128  # numbers of a head of the resampler
_THETA = 10_000.0
_EPS = 1e-6  # of what follows the tower


class _MiniCpmTower(SiglipTower):
    def placed(self) -> ov.Node:
        """The embeddings of patches with their learned positions. The rows of a part attend to each other."""
        stream = self.embedded()
        places = self.input("learned_places", ov.Type.i64, (-1,))
        learned = floats(self.numbers(f"{_TOWER}.embeddings.position_embedding.weight"))
        self.add_windows()
        return ops.add(stream, ops.gather(learned, places, integer(0)))


class MiniCpmEncoder(_MiniCpmTower):
    """Of 2.6 to 4.5: learned queries attend to the patches of each part."""

    def model(self) -> ov.Model:
        """See `VisionGraph`."""
        stream = self.placed()
        for i in range(self.num_layers - bool(self.whole.get("drop_vision_last_layer", True))):
            stream = self.layer(i, stream, None, within=True)
        return self.finished(self._resampled(self.norm(f"{_TOWER}.post_layernorm", stream, self.eps)))

    def _resampled(self, stream: ov.Node) -> ov.Node:
        """The tokens of all parts, [n, hidden]."""
        if f"{_RESAMPLER}.kv_proj.weight" in self.tensors:
            stream = self.linear(f"{_RESAMPLER}.kv_proj", stream)
        values = self.norm(f"{_RESAMPLER}.ln_kv", stream, _EPS)
        queries = self.norm(f"{_RESAMPLER}.ln_q", floats(self.numbers(f"{_RESAMPLER}.query")), _EPS)
        matrix, bias = (self.numbers(f"{_RESAMPLER}.attn.in_proj_{part}") for part in ("weight", "bias"))
        width = matrix.shape[1]
        read = [
            ops.add(ops.matmul(rows, self.matrix(weight), False, True), floats(added[None]))
            for rows, weight, added in zip(
                (queries, ops.add(values, self._positions(width)), values), np.split(matrix, 3), np.split(bias, 3),
                strict=True,
            )
        ]  # fmt: skip
        heads = ints(-1, width // _HEAD, _HEAD)
        asked, keys, values = (ops.reshape(each, heads, special_zero=False) for each in read)
        members, mask, _ = self.windows or self.add_windows()
        of_parts = [
            transposed(ops.gather(each, members, integer(0)), 0, 2, 1, 3) for each in (keys, values)
        ]  # [parts, heads, n, size]
        turned = ops.unsqueeze(transposed(asked, 1, 0, 2), ints(0))
        shape = ops.concat([ops.gather(ops.shape_of(members), ints(0), integer(0)), ints(1, 1, 1)], 0)
        asked = ops.broadcast(turned, shape, broadcast_spec="BIDIRECTIONAL")
        scale = floats(_HEAD**-0.5)
        found = transposed(ops.scaled_dot_product_attention(asked, *of_parts, mask, scale), 0, 2, 1, 3)
        found = self.linear(f"{_RESAMPLER}.attn.out_proj", ops.reshape(found, ints(-1, width), special_zero=False))
        found = self.norm(f"{_RESAMPLER}.ln_post", found, _EPS)
        last = np.ascontiguousarray(self.numbers(f"{_RESAMPLER}.proj").T)
        return ops.matmul(found, self.matrix(last), False, True)

    def _positions(self, width: int) -> ov.Node:
        """Sines and cosines of each patch's column and row, [n, width]."""
        positions = self.input("patch_positions", ov.Type.i64, (-1, 2))
        count = width // 4
        frequencies = frequencies_of(_THETA, np.arange(count, dtype=np.float32) / np.float32(count))
        parts = []
        for axis in (1, 0):
            along = ops.convert(ops.gather(positions, ints(axis), integer(1)), "f32")
            angles = ops.multiply(along, floats(frequencies[None]))
            parts += [ops.sin(angles), ops.cos(angles)]
        return ops.concat(parts, 1)


class MiniCpm46Encoder(_MiniCpmTower):
    """Of 4.6: after one of the layers, and after the last, four rows become one."""

    def model(self) -> ov.Model:
        """See `VisionGraph`."""
        stream, merged_after = self.placed(), int(self.whole.get("insert_layer_id", 6))
        for i in range(self.num_layers):
            stream = self.layer(i, stream, None, within=True)
            if i == merged_after:
                stream = self._merged(stream)
                self.add_windows("merged_window")
        read = self.norm(f"{_TOWER}.post_layernorm", stream, self.eps)
        read = ops.reshape(read, ints(-1, 4 * self.width), special_zero=False)
        read = self.linear(f"{_MERGER}.linear_1", self.norm(f"{_MERGER}.pre_norm", read, _EPS))
        return self.finished(self.linear(f"{_MERGER}.linear_2", ops.gelu(read, "ERF")))

    def _merged(self, stream: ov.Node) -> ov.Node:
        """Four rows each attend to each other, and become one."""
        name = f"{_TOWER}.vit_merger"
        found = self.attention(name, self.norm(f"{name}.layer_norm1", stream, self.eps), 4)
        stream = ops.add(stream, found)
        mean = ops.reduce_mean(ops.reshape(stream, ints(-1, 4, self.width), special_zero=False), ints(1), False)
        read = ops.reshape(stream, ints(-1, 4 * self.width), special_zero=False)
        read = self.linear(f"{name}.linear_1", self.norm(f"{name}.pre_norm", read, self.eps))
        return ops.add(mean, self.linear(f"{name}.linear_2", ops.gelu(read, "TANH")))
