"""Architectures that Transformers has after 5.5, and Ling's, in PyTorch: judges, made of the classes that 5.5 has.

    register()           # AutoModelForCausalLM knows them
    adapt(model)         # a model of one, before its weights are set

Facts from Transformers 5.24, `modular_*.py` and `conversion_mapping.py`; with its random checkpoints, Outrider's logits
are those of its classes within 2e-6 of the largest. Ling's code is in its checkpoints; llama.cpp's and Sarvam's in
Transformers, which has the same parts, are followed.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.cohere2 import Cohere2Config, Cohere2ForCausalLM
from transformers.models.glm4_moe import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.granite import GraniteConfig, GraniteForCausalLM
from transformers.models.granitemoeshared import GraniteMoeSharedConfig, GraniteMoeSharedForCausalLM
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

_SLIDE = "sliding_attention"
# What the classes here would take otherwise, by the names that it has in them.
_HIDDEN = {"layer_types": "kinds", "sliding_window": "window", "rope_parameters": "ropes"}
_QKV = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")


@dataclass(frozen=True)
class Judge:
    """The classes that it is made of, what its configuration has otherwise, and what published files call tensors.

    prepare: what is done to a model. keys: of its configuration, as published; "" for none.
    """

    config: Any
    model: Any
    given: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] = lambda model: None

    @property
    def mapped(self) -> dict[str, str]:
        """Published keys by those of the classes here."""
        return {ours: theirs for ours, theirs in self.keys.items() if isinstance(theirs, str) and ours != "model_type"}


def by_layer(model: Any) -> None:
    """Have layers with a window attend within it, and each layer rotate by what the configuration says of it."""
    config = model.config

    def pre(layer: int) -> Callable[..., Any]:
        angles = _angles_of(config, layer)

        def change(_: Any, inputs: Any, options: dict[str, Any]) -> Any:
            positions, mask = options["position_ids"], options["attention_mask"]
            if config.kinds[layer] == _SLIDE:
                keys = torch.arange(mask.shape[-1])
                is_far = positions[:, None, :, None] - keys >= config.window
                mask = mask.masked_fill(is_far, torch.finfo(mask.dtype).min)
            return inputs, options | {"attention_mask": mask, "position_embeddings": angles(positions)}

        return change

    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(pre(i), with_kwargs=True)


def _angles_of(config: Any, layer: int) -> Callable[[torch.Tensor], Any]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bases = getattr(config, "layer_rope_theta", None)
    rope = {"rope_type": "default", "rope_theta": bases[layer]} if bases else config.ropes[config.kinds[layer]]
    rates, scale = torch.zeros(size // 2), 1.0
    if rope["rope_type"] != "default":
        plain = LlamaConfig(head_dim=size, max_position_embeddings=4096, rope_parameters=rope)
        rates, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](plain, torch.device("cpu"))
    elif rope["rope_theta"]:
        rates = 1.0 / rope["rope_theta"] ** (torch.arange(size // 2) * 2 / size)

    def angles(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = torch.cat([positions[..., None] * rates] * 2, -1)
        return turned.cos() * scale, turned.sin() * scale

    return angles


def with_sinks(model: Any) -> None:
    by_layer(model)
    for layer in model.model.layers:
        layer.self_attn.sinks = nn.Parameter(torch.zeros(model.config.num_attention_heads))


def with_norms_after(model: Any) -> None:
    """HyperCLOVA X: norms after both parts, and logits that are multiplied by what Granite divides them by."""
    config = model.config
    for layer in model.model.layers:
        for name, part in (("post_norm1", layer.self_attn), ("post_norm2", layer.mlp)):
            norm = type(layer.input_layernorm)(config.hidden_size, config.rms_norm_eps)
            layer.add_module(name, norm)
            part.register_forward_hook(lambda _, __, made, norm=norm: _normed(norm, made))
    model.lm_head.register_forward_hook(lambda _, __, logits: logits * config.logits_scaling**2)


def _normed(norm: Any, made: Any) -> Any:
    return (norm(made[0]), *made[1:]) if isinstance(made, tuple) else norm(made)


class Mixture(nn.Module):  # type: ignore[misc]
    """Experts of which the best by sigmoid are added, by their shares."""

    def __init__(self, config: Any, part: Any) -> None:
        super().__init__()
        self.active = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList([type(part)(config) for _ in range(config.num_experts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, chosen = self.gate(x).sigmoid().topk(self.active, -1)
        shares = torch.zeros_like(self.gate(x)).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        return sum(share[..., None] * each(x) for share, each in zip(shares.unbind(-1), self.experts, strict=True))


def with_mixtures(model: Any) -> None:
    """North Mini Code: all layers but the first have experts, and the first rotates, whose attention is full."""
    first, *others = model.model.layers
    first.self_attn.sliding_window = model.config.sliding_window
    wide = copy.copy(model.config)
    wide.intermediate_size = model.config.prefix_dense_intermediate_size
    first.mlp = type(first.mlp)(wide)
    for layer in others:
        layer.mlp = Mixture(model.config, layer.mlp)


_EXAONE = {
    "model.layers.": "transformer.h.", "self_attn.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention",
    "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "gate_proj": "c_fc_0", "up_proj": "c_fc_1",
    "down_proj": "c_proj", "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f",
}  # fmt: skip
_KEYS_OF_EXAONE = {
    "num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act",
}  # fmt: skip
_LING = {
    "self_attn.qkv_proj": "attention.query_key_value", "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
    "model.embed_tokens": "model.word_embeddings", "e_score_correction_bias": "expert_bias",
}  # fmt: skip
_HY3 = {"mlp.gate.weight": "mlp.router.gate.weight", "gate.e_score_correction_bias": "expert_bias"} | {
    "shared_experts": "shared_mlp"
}
_SWASH = {
    "router.layer": "router", "moe.input_linear.weight": "moe.experts.gate_up_proj",
    "moe.output_linear.weight": "moe.experts.down_proj",
}  # fmt: skip
_OF_GLM = {"use_qk_norm": True, "partial_rotary_factor": 1.0}
_SINKS = {"attn_implementation": "judged", "use_cache": True}

JUDGES = {
    "bailing_moe_v2": Judge(
        Glm4MoeConfig, Glm4MoeForCausalLM, _OF_GLM | {"partial_rotary_factor": 0.5}, _LING,
        {
            "model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"], "partial_rotary_factor": 0.5,
            "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts",
        },
    ),
    "cohere2_moe": Judge(Cohere2Config, Cohere2ForCausalLM, prepare=with_mixtures),
    "exaone": Judge(LlamaConfig, LlamaForCausalLM, {}, _EXAONE, _KEYS_OF_EXAONE),
    "granite_swa": Judge(GraniteConfig, GraniteForCausalLM, _SINKS, prepare=with_sinks),
    "granitemoe_swa": Judge(
        GraniteMoeSharedConfig, GraniteMoeSharedForCausalLM, _SINKS, _SWASH, prepare=with_sinks
    ),
    "hy_v3": Judge(
        Glm4MoeConfig, Glm4MoeForCausalLM, _OF_GLM, _HY3,
        {
            "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts",
            "router_scaling_factor": "routed_scaling_factor",
        },
    ),
    "hyperclovax": Judge(GraniteConfig, GraniteForCausalLM, {}, prepare=with_norms_after),
    "internlm3": Judge(LlamaConfig, LlamaForCausalLM),
    "iquestcoder": Judge(LlamaConfig, LlamaForCausalLM),
    "mellum": Judge(
        Qwen3MoeConfig, Qwen3MoeForCausalLM, {"attn_implementation": "eager", "decoder_sparse_step": 1},
        prepare=by_layer,
    ),
    "sarvam_moe": Judge(Glm4MoeConfig, Glm4MoeForCausalLM, _OF_GLM, _LING),
}  # fmt: skip


def register() -> None:
    """Have Transformers' classes for any model know them; one that does itself is left alone."""
    ALL_ATTENTION_FUNCTIONS.register("judged", eager_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register("judged", eager_mask)
    for name, judge in JUDGES.items():
        keys = {**judge.config.attribute_map, **judge.mapped}
        config = type(f"{name.title()}Config", (judge.config,), {"model_type": name, "attribute_map": keys})
        model = type(f"{name.title()}ForCausalLM", (judge.model,), {"config_class": config})
        try:
            AutoConfig.register(name, config)
        except ValueError:
            continue
        AutoModelForCausalLM.register(config, model)


def configured(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """What the configuration of an architecture is made with."""
    judge = JUDGES.get(name)
    if judge is None:
        return given
    hidden = _HIDDEN if judge.prepare in (by_layer, with_sinks) else {}
    return {**judge.given, **{hidden.get(key, key): value for key, value in given.items()}}


def adapt(model: Any) -> None:
    """Give a model what its classes have not, and have it saved as its publishers do; others are left alone."""
    architecture = model.config.model_type
    judge = JUDGES.get(architecture)
    if judge is None:
        return
    judge.prepare(model)
    save = model.save_pretrained

    def save_as_published(folder: Path, **options: Any) -> None:
        save(folder, **options)
        path = Path(folder) / "model.safetensors"
        tensors = load_file(path)
        if "self_attn.qkv_proj" in judge.names:
            for first in [name for name in tensors if name.endswith(_QKV[0])]:
                parts = [tensors.pop(first.replace(_QKV[0], part)) for part in _QKV]
                tensors[first.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        for name in [name for name in tensors if name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))]:
            whole, module = tensors.pop(name), name.rpartition(".")[0]
            gate, up, down = f"{module}.{{}}.gate_proj", f"{module}.{{}}.up_proj", f"{module}.{{}}.down_proj"
            halves = {down: whole}
            if name.endswith("gate_up_proj"):
                halves = dict(zip((gate, up), whole.chunk(2, 1), strict=True))
            tensors |= {
                f"{part.format(i)}.weight": each for part, half in halves.items() for i, each in enumerate(half)
            }
        save_file({published_name(architecture, name): values.contiguous() for name, values in tensors.items()}, path)
        file = Path(folder) / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        config |= {key: config.pop(hidden) for key, hidden in _HIDDEN.items() if hidden in config}
        for key, value in judge.keys.items():
            config[key] = config.pop(value) if isinstance(value, str) and value in config else value
        file.write_text(json.dumps(config), encoding="utf-8")

    model.save_pretrained = save_as_published


def published_name(architecture: str, name: str) -> str:
    """What published files call a tensor of the classes here."""
    for ours, theirs in JUDGES[architecture].names.items():
        name = name.replace(ours, theirs)
    return name


def key_mapping(architecture: str) -> dict[str, str]:
    """The names of tensors in published files, as `from_pretrained` takes them."""
    names = JUDGES[architecture].names if architecture in JUDGES else {}
    return {rf"{re.escape(theirs)}": ours for ours, theirs in names.items()}
