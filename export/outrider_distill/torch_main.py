"""The main model in PyTorch, with the weights of its bundle: on a GPU it writes hundreds of texts at once.

    main = TorchMain(read_teacher(bundle), read_layers(bundle), tap_names(30), torch.device("cuda"), torch.bfloat16)
    cache = main.new_cache(num_rows=512, length=384)
    states = main.read(prompts, cache)
    states = main.step(token_ids, positions, cache)

A decoder as Llama's, with or without biases of queries, keys and values (Qwen2). Whether a bundle's model is one is not
asked here: `outrider_distill.gpu_writer` compares what both calculate.

Shapes: B rows, T tokens, S places of the cache, h hidden size, H heads, K key-value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.nn import functional

from outrider.models.backends.taps import LAST, after_layers
from outrider_distill.train.layers import Teacher, turn, turns

_NORMS = ("input_layernorm", "post_attention_layernorm")


class TorchMain:
    """A main model whose weights are on a device, for inference. The residual stream is in float32.

    layers: the weights of all, one by one, so that they are not in memory twice. features: names of the hidden states
    that are returned, beside the last ones. dtype: of weights, keys and values.
    """

    def __init__(
        self, teacher: Teacher, layers: Iterable[dict[str, Any]], features: Collection[str], device: Any, dtype: Any
    ) -> None:
        self.shape, self.device, self.dtype = teacher.shape, device, dtype
        self._features = frozenset(features)
        self._embedding = teacher.embedding.to(device, dtype)
        self._lm_head = teacher.lm_head[: teacher.num_tokens].to(device, dtype)
        self._norm = teacher.norm.to(device).float()
        self._layers = [self._placed(layer) for layer in layers]

    def new_cache(self, num_rows: int, length: int) -> Any:
        """Room for keys and values: [layers, 2, num_rows, K, length, d]."""
        s = self.shape
        sizes = (s.num_layers, 2, num_rows, s.num_kv_heads, length, s.head_size)
        return torch.zeros(sizes, dtype=self.dtype, device=self.device)

    def read(self, token_ids: Any, cache: Any) -> dict[str, Any]:
        """Read prompts from their beginning, int64 [B, T], padded on the right, into the first B rows of the cache.

        Returns the hidden states [B, T, h] by the names of `outrider.models.backends.taps`.
        """
        num_rows, num_tokens = token_ids.shape
        positions = torch.arange(num_tokens, device=self.device)

        def attend(index: int, q: Any, k: Any, v: Any) -> Any:
            cache[index, 0, :num_rows, :, :num_tokens] = k
            cache[index, 1, :num_rows, :, :num_tokens] = v
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        return self._run(token_ids, positions, attend)

    def step(self, token_ids: Any, positions: Any, cache: Any) -> dict[str, Any]:
        """Read one more token of each row: int64 [B] each. Returns hidden states [B, 1, h] by name.

        Its shapes depend on nothing but those of its arguments, so that it can be captured in a CUDA graph.
        """
        s, num_rows = self.shape, len(token_ids)
        rows, places = (torch.arange(size, device=self.device) for size in (num_rows, cache.shape[4]))
        hidden = (places > positions[:, None])[:, None, None]  # [B, 1, 1, S]

        def attend(index: int, q: Any, k: Any, v: Any) -> Any:
            keys, values = cache[index]
            keys[rows, :, positions], values[rows, :, positions] = k[:, :, 0], v[:, :, 0]
            grouped = (q * s.head_size**-0.5).view(num_rows, s.num_kv_heads, -1, s.head_size)
            scores = (grouped @ keys.transpose(-1, -2)).float().masked_fill(hidden, -torch.inf)
            return (scores.softmax(-1).to(self.dtype) @ values).view(q.shape)

        return self._run(token_ids[:, None], positions[:, None], attend)

    def logits(self, last: Any) -> Any:
        """States after the final norm [.., h] to float32 [.., vocab]."""
        return functional.linear(last.to(self.dtype), self._lm_head).float()

    def _placed(self, layer: dict[str, Any]) -> dict[str, Any]:
        """A layer's weights, with products that read the same joined to one."""

        def joined(*names: str) -> Any:
            found = [layer[name] for name in names if name in layer]
            return torch.cat(found).to(self.device, self.dtype) if len(found) == len(names) else None

        attention = [f"self_attn.{name}_proj" for name in "qkv"]
        return {
            "qkv": joined(*(f"{name}.weight" for name in attention)),
            "bias": joined(*(f"{name}.bias" for name in attention)),
            "out": joined("self_attn.o_proj.weight"),
            "gate_up": joined("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            "down": joined("mlp.down_proj.weight"),
            **{name: layer[f"{name}.weight"].to(self.device).float() for name in _NORMS},
        }

    def _run(self, token_ids: Any, positions: Any, attend: Any) -> dict[str, Any]:
        s = self.shape
        cos, sin = (each.to(self.dtype) for each in turns(positions, s.head_size, s.rope_theta))
        x, states = functional.embedding(token_ids, self._embedding).float(), dict[str, Any]()
        for index, layer in enumerate(self._layers):
            if (name := after_layers(index)) in self._features:
                states[name] = x
            projected = functional.linear(self._normed(x, layer["input_layernorm"]), layer["qkv"], layer["bias"])
            heads = projected.unflatten(-1, (-1, s.head_size)).transpose(1, 2)
            turned = turn(heads[:, : -s.num_kv_heads], cos, sin)
            q, k = turned[:, : s.num_heads], turned[:, s.num_heads :]
            attended = attend(index, q, k, heads[:, -s.num_kv_heads :])
            x = x + functional.linear(attended.transpose(1, 2).flatten(2), layer["out"])
            normed = self._normed(x, layer["post_attention_layernorm"])
            gate, up = functional.linear(normed, layer["gate_up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        return states | {LAST: self._normed(x, self._norm)}

    def _normed(self, x: Any, weight: Any) -> Any:
        return functional.rms_norm(x, weight.shape, weight, self.shape.norm_epsilon).to(self.dtype)
