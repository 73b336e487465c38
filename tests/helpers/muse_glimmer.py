"""Muse Glimmer's text part in PyTorch, which Transformers has from 5.15 on: a judge for older ones.

    register()     # AutoModelForCausalLM knows `muse_glimmer_text`

Beside Gemma 2: queries and keys have norms without weights, queries are scaled, layers without a window do not rotate,
a gate multiplies what attention finds, embeddings have a norm instead of a factor, norms of what is added have an eps
of their own, the last norm has no offset, and logits are scaled before their cap. Facts from Transformers 5.24; its
logits are those of `MuseGlimmerForConditionalGeneration` there, to 2e-6 of the largest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, apply_rotary_pos_emb, repeat_kv

NAME = "muse_glimmer_text"


class MuseGlimmerTextConfig(Gemma2Config):  # type: ignore[misc]
    model_type = NAME

    def __init__(self, **given: Any) -> None:
        count = given.setdefault("num_hidden_layers", 52)
        kinds = ["sliding_attention" if (count - 1 - i) % 4 else "full_attention" for i in range(count)]
        ours = {"post_norm_eps": 1e-8, "qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404}
        usual = {
            "layer_types": kinds, "hidden_activation": "silu", "final_logit_softcapping": 20.0, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, "sliding_window": 2048, "query_pre_attn_scalar": given.get("head_dim", 128),
        }  # fmt: skip
        super().__init__(**{**usual, **ours, **given, "attn_implementation": "eager"})


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Attention(Gemma2Attention):  # type: ignore[misc]
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.gate_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)

    def forward(
        self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, past_key_values: Any = None, **_: Any
    ) -> Any:
        shape, eps = (*hidden_states.shape[:-1], -1, self.head_dim), self.config.rms_norm_eps
        queries, keys, values = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = normed(queries, eps) * self.config.qk_scale_factor, normed(keys, eps)
        if self.sliding_window:
            queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        keys, values = (repeat_kv(each, self.num_key_value_groups) for each in (keys, values))
        scores = queries @ keys.transpose(2, 3) * self.head_dim**-0.5 + attention_mask
        found = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
        return self.o_proj(found * self.gate_proj(hidden_states).sigmoid()), None


class Embedding(nn.Embedding):  # type: ignore[misc]
    eps = 1e-5

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's name
        return normed(super().forward(input), self.eps)


class Norm(nn.RMSNorm):  # type: ignore[misc]
    """The last one, whose weights have no offset."""


class Head(nn.Linear):  # type: ignore[misc]
    multiplier = 1.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's name
        return super().forward(input) * self.multiplier


class MuseGlimmerForCausalLM(Gemma2ForCausalLM):  # type: ignore[misc]
    config_class = MuseGlimmerTextConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.model.embed_tokens.eps = config.rms_norm_eps
        self.model.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.multiplier = config.output_multiplier
        for i, layer in enumerate(self.model.layers):
            layer.self_attn = Attention(config, i)
            layer.post_attention_layernorm.eps = layer.post_feedforward_layernorm.eps = config.post_norm_eps


def register() -> None:
    """Have Transformers' classes for any model know it; one that does itself is left alone."""
    AutoConfig.register(NAME, MuseGlimmerTextConfig, exist_ok=True)
    AutoModelForCausalLM.register(MuseGlimmerTextConfig, MuseGlimmerForCausalLM, exist_ok=True)
