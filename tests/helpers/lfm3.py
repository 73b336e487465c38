"""LFM3 in PyTorch, which Transformers has from 5.24 on at the latest: a judge for older ones.

    register()     # AutoModelForCausalLM knows `lfm3`

Beside LFM2: norms after each part, too, layers with a sliding window, RoPE by kind of layer, and a gate of each head
after attention, by its published name. Facts from Transformers 5.24; its logits are those of `Lfm3ForCausalLM` there,
to 1e-6 of the largest.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, Lfm2Config, Lfm2ForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.lfm2.modeling_lfm2 import (
    Lfm2Attention,
    Lfm2MLP,
    Lfm2Model,
    Lfm2RMSNorm,
    Lfm2ShortConv,
    apply_rotary_pos_emb,
    repeat_kv,
)

NAME = "lfm3"
_SLIDE, _FULL = "sliding_attention", "full_attention"
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_ROPES = {_SLIDE: _PLAIN, _FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}}


class Lfm3Config(Lfm2Config):  # type: ignore[misc]
    model_type = NAME

    def __init__(self, **given: Any) -> None:
        ours = {"head_dim": 128, "sliding_window": 256, "use_sandwich_norm": True, "use_attention_gate": True}
        usual = {"conv_L_cache": 7, "block_auto_adjust_ff_dim": False, "rope_parameters": _ROPES}
        super().__init__(**{**usual, **ours, **given, "attn_implementation": "eager"})


class Attention(Lfm2Attention):  # type: ignore[misc]
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_norm, self.k_norm, self.o_proj = self.q_layernorm, self.k_layernorm, self.out_proj
        del self.q_layernorm, self.k_layernorm, self.out_proj
        self.gate_proj = nn.Linear(config.hidden_size, config.num_attention_heads, bias=False)
        if not config.use_attention_gate:
            self.gate_proj = None

    def forward(
        self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, past_key_values: Any = None, **_: Any
    ) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        queries = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        values = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        keys, values = (repeat_kv(each, self.num_key_value_groups) for each in (keys, values))
        scores = queries @ keys.transpose(2, 3) * self.scaling + attention_mask
        found = (scores.softmax(-1) @ values).transpose(1, 2)
        if self.gate_proj is not None:
            found = found * self.gate_proj(hidden_states).sigmoid().unsqueeze(-1)
        return self.o_proj(found.flatten(2))


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Any, i: int) -> None:
        super().__init__()
        self.kind = config.layer_types[i]
        if self.kind == "conv":
            self.conv = Lfm2ShortConv(config, i)
        else:
            self.self_attn = Attention(config, i)
        self.feed_forward = Lfm2MLP(config)
        for name in ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"):
            is_there = config.use_sandwich_norm or not name.startswith("post_")
            self.add_module(name, Lfm2RMSNorm(config.hidden_size, eps=config.norm_eps) if is_there else nn.Identity())

    def forward(self, x: torch.Tensor, angles: Any, mask: Any, cache: Any) -> torch.Tensor:
        read = self.operator_norm(x)
        if self.kind == "conv":
            found = self.conv(read, past_key_values=cache, attention_mask=mask)
        else:
            found = self.self_attn(read, angles, mask, cache)
        x = x + self.post_operator_norm(found)
        return x + self.post_ffn_norm(self.feed_forward(self.ffn_norm(x)))


class Lfm3Model(Lfm2Model):  # type: ignore[misc]
    """config: with a rotation for all layers, which the class that this is made of reads. own: LFM3's."""

    def __init__(self, config: Any, own: Any) -> None:
        super().__init__(config)
        self.config = own
        self.layers = nn.ModuleList([Layer(own, i) for i in range(own.num_hidden_layers)])

    def angles(self, kind: str, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rope, half = self.config.rope_parameters[kind], self.config.head_dim // 2
        rates = 1.0 / rope["rope_theta"] ** (torch.arange(half) / half)
        rates[int(rope.get("partial_rotary_factor", 1.0) * half) :] = 0
        each = positions[..., None].float() * rates
        return torch.cat([each, each], -1).cos(), torch.cat([each, each], -1).sin()

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None,
        inputs_embeds: Any = None, use_cache: Any = None, output_hidden_states: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(x.shape[1])[None] + seen
        given = {
            "config": self.config, "inputs_embeds": x, "attention_mask": attention_mask,
            "past_key_values": past_key_values, "position_ids": position_ids,
        }  # fmt: skip
        masks = {_FULL: create_causal_mask(**given), _SLIDE: create_sliding_window_causal_mask(**given), "conv": None}
        states = [x]
        for layer in self.layers:
            angles = None if layer.kind == "conv" else self.angles(layer.kind, position_ids)
            x = layer(x, angles, masks[layer.kind], past_key_values)
            states.append(x)
        x = states[-1] = self.embedding_norm(x)
        hidden_states = tuple(states) if output_hidden_states else None
        return BaseModelOutputWithPast(x, past_key_values, hidden_states=hidden_states)


class Lfm3ForCausalLM(Lfm2ForCausalLM):  # type: ignore[misc]
    config_class = Lfm3Config

    def __init__(self, config: Any) -> None:
        plain = copy.deepcopy(config)
        plain.rope_parameters = {**_PLAIN}
        super().__init__(plain)
        self.model, self.config = Lfm3Model(plain, config), config
        self.post_init()


def register() -> None:
    """Have Transformers' classes for any model know it; one that does itself is left alone."""
    AutoConfig.register(NAME, Lfm3Config, exist_ok=True)
    AutoModelForCausalLM.register(Lfm3Config, Lfm3ForCausalLM, exist_ok=True)
