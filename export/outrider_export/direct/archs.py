"""The architectures that are converted without PyTorch, by their differences from Llama."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider_export.direct import adjustments
from outrider_export.direct.arch import Arch, ArchAttention, ArchExperts, ArchMatrices, Norms
from outrider_export.direct.experts import CHOICE

_AROUND = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_AROUND_MLP = Norms("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
_AFTER = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_ADDED = Norms(offset=1.0)
_AROUND_ADDED = replace(_AROUND, offset=1.0)
_PAIRS = ArchMatrices(interleaved=True, gguf_interleaved=True)
_GGUF_PAIRS = ArchMatrices(gguf_interleaved=True)
_OF_GEMMA = {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_NAMES_OF_LFM2 = {
    "self_attn.o_proj": "self_attn.out_proj", "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "model.norm": "model.embedding_norm",
}  # fmt: skip
_KEYS_OF_LFM2 = {
    "rms_norm_eps": "norm_eps", "intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding",
}  # fmt: skip
_OF_LFM2: dict[str, Any] = {
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True, "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
}  # fmt: skip
_NAMES_OF_LFM3 = {
    "self_attn.output_gate": "self_attn.gate_proj", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "model.norm": "model.embedding_norm",
}  # fmt: skip
_OF_LFM3: dict[str, Any] = {
    "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 256, "tie_word_embeddings": True, "conv_L_cache": 7,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    },
}  # fmt: skip
_EXPERTS = {
    f"mlp.experts.{name}_proj": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")
}  # of each expert a tensor
_NAMES_OF_QWEN_MOE = _EXPERTS | {"mlp.router": "mlp.gate"}
_NAMES_OF_MIXTRAL = {
    "mlp.router": "block_sparse_moe.gate", "mlp.experts.gate_proj": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.up_proj": "block_sparse_moe.experts.{}.w3", "mlp.experts.down_proj": "block_sparse_moe.experts.{}.w2",
}  # fmt: skip
_NAMES_OF_GRANITE_MOE = {
    "mlp.router": "block_sparse_moe.router.layer", "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear",
    "mlp.experts.down_proj": "block_sparse_moe.output_linear",
}  # fmt: skip
_NAMES_OF_LFM2_MOE = _NAMES_OF_LFM2 | {
    "mlp.router": "feed_forward.gate", f"{CHOICE}.bias": "feed_forward.expert_bias",
    "mlp.experts.gate_proj": "feed_forward.experts.{}.w1", "mlp.experts.up_proj": "feed_forward.experts.{}.w3",
    "mlp.experts.down_proj": "feed_forward.experts.{}.w2",
}  # fmt: skip
_NAMES_OF_GPT_OSS = {
    f"mlp.experts.{name}.{kind}": f"mlp.experts.{name}{end}"
    for name in ("gate_up_proj", "down_proj") for kind, end in (("weight", ""), ("bias", "_bias"))
} | {"self_attn.sinks.weight": "self_attn.sinks"}  # fmt: skip
_LOCAL = {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}
_NAMES_OF_GRANITE_HYBRID = _NAMES_OF_GRANITE_MOE | {
    "mlp.gate_up_proj": "shared_mlp.input_linear", "mlp.down_proj": "shared_mlp.output_linear",
}  # fmt: skip
_SHARED_OF_QWEN = {f"mlp.{name}_proj": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")} | {
    "mlp.shared_gate": "mlp.shared_expert_gate"
}
_NAMES_OF_QWEN3_5_MOE = (
    _NAMES_OF_QWEN_MOE
    | _SHARED_OF_QWEN
    | {
        "mlp.experts.gate_up_proj.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj.weight": "mlp.experts.down_proj",
    }
)
_OF_GRANITE_HYBRID: dict[str, Any] = {
    "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
    "mamba_expand": 2,
}  # fmt: skip
_OF_QWEN3_5 = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}  # fmt: skip
_OF_QWEN3_5_MOE: dict[str, Any] = _OF_QWEN3_5 | {
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
}  # fmt: skip
_NAMES_OF_NEMOTRON_H = {
    **{f"self_attn.{name}_proj": f"mixer.{name}_proj" for name in "qkvo"},
    **{f"mlp.{name}_proj": f"mixer.{name}_proj" for name in ("up", "down")},
    **{f"mamba.{name}": f"mixer.{name}" for name in ("in_proj", "out_proj", "conv1d", "norm", "A_log", "dt_bias", "D")},
    "input_layernorm": "norm", "post_attention_layernorm": "norm", "model.embed_tokens": "model.embeddings",
    "model.norm": "model.norm_f", "mlp.router": "mixer.gate", f"{CHOICE}.bias": "mixer.gate.e_score_correction_bias",
    **{f"mlp.experts.{name}_proj": f"mixer.experts.{{}}.{name}_proj" for name in ("up", "down")},
}  # fmt: skip
_KEYS_OF_NEMOTRON_H = {
    "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act", "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim", "mamba_n_groups": "n_groups", "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel", "num_experts": "n_routed_experts",
}  # fmt: skip
_OF_NEMOTRON_H: dict[str, Any] = {
    "rms_norm_eps": 1e-5, "hidden_act": "relu2", "mamba_hidden_act": "silu", "mamba_n_heads": 128, "mamba_d_head": 64,
    "mamba_n_groups": 8, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_norm_by_group": True,
}  # fmt: skip
_NAMES_OF_GEMMA4 = {
    "output_scale.weight": "layer_scalar", "mlp.router": "router.proj", "mlp.router_scale.weight": "router.scale",
    "mlp.expert_scales.weight": "router.per_expert_scale", "mlp.experts.gate_up_proj.weight": "experts.gate_up_proj",
    "mlp.experts.down_proj.weight": "experts.down_proj",
}  # fmt: skip
_OF_GEMMA4: dict[str, Any] = {
    "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_multiplier": 1.0,
    "sliding_window": 512, "global_head_dim": 512, "hidden_size_per_layer_input": 256, "norm_topk_prob": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}  # fmt: skip
_OF_GEMMA3N = _OF_GEMMA | {
    "attention_multiplier": 1.0, "sliding_window": 512, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 15, "altup_num_inputs": 4, "altup_active_idx": 0, "laurel_rank": 64,
}  # fmt: skip
_SANDWICH = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_OF_GLM: dict[str, Any] = {"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7}
_OF_MUSE_GLIMMER: dict[str, Any] = {
    "head_dim": 128, "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8, "rope_theta": 1e4, "sliding_window": 2048,
    "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404,
}  # fmt: skip
_OF_MINISTRAL3: dict[str, Any] = {
    "head_dim": 128, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip
_OF_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_NAMES_OF_DEEPSEEK = (
    _NAMES_OF_QWEN_MOE
    | {f"mlp.{name}_proj": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
    | {f"{CHOICE}.bias": "mlp.gate.e_score_correction_bias"}
)
_DEEPSEEK: dict[str, Any] = {
    "names": _NAMES_OF_DEEPSEEK,
    "keys": {"num_experts": "n_routed_experts", "num_dense_layers": "first_k_dense_replace"},
}
_OF_DEEPSEEK_V2 = _OF_LATENT | {
    "num_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "num_dense_layers": 0,
}  # fmt: skip
_OF_DEEPSEEK_V3 = _OF_LATENT | {
    "num_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_dense_layers": 3,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
_OF_GLM4_MOE_LITE = _OF_LATENT | {
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5,
    "num_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536, "num_dense_layers": 1,
    "num_experts_per_tok": 4, "routed_scaling_factor": 1.8, "norm_topk_prob": True,
}  # fmt: skip
_NAMES_OF_AFMOE = _NAMES_OF_DEEPSEEK | {
    "mlp.router": "mlp.router.gate", f"{CHOICE}.bias": "mlp.expert_bias",
    "self_attn.output_gate": "self_attn.gate_proj",
}  # fmt: skip
_KEYS_OF_AFMOE = {
    "n_shared_experts": "num_shared_experts", "routed_scaling_factor": "route_scale", "scoring_func": "score_func",
    "sliding_window_pattern": "global_attn_every_n_layers", "norm_topk_prob": "route_norm",
}  # fmt: skip
_OF_AFMOE: dict[str, Any] = {
    "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 1024, "num_experts": 64, "num_experts_per_tok": 6,
    "n_shared_experts": 2, "moe_intermediate_size": 1408, "num_dense_layers": 1, "norm_topk_prob": True,
}  # fmt: skip
_NAMES_OF_HUNYUAN = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
_NAMES_OF_HUNYUAN_MOE = {
    **_NAMES_OF_HUNYUAN, **_EXPERTS, "mlp.router": "mlp.gate.wg",
    **{f"mlp.{name}_proj": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip
_OF_SOLAR_OPEN: dict[str, Any] = {
    "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "intermediate_size": 10_240, "num_experts": 128,
    "n_shared_experts": 1, "moe_intermediate_size": 1280, "num_dense_layers": 0, "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}  # fmt: skip
_OF_EXAONE_MOE: dict[str, Any] = {
    "sliding_window": 4096, "rms_norm_eps": 1e-5, "num_experts": 64, "n_shared_experts": 1,
    "moe_intermediate_size": 1024, "num_dense_layers": 1, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
_OF_MINIMAX_M2: dict[str, Any] = {
    "head_dim": 128, "rope_theta": 5e6, "num_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 0,
    "norm_topk_prob": True,
}  # fmt: skip
_OF_GLM4_MOE: dict[str, Any] = {
    "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "num_experts": 128, "n_shared_experts": 1,
    "moe_intermediate_size": 1408, "num_dense_layers": 1, "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip
_KEYS_OF_ERNIE_MOE = {
    "num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k", "n_shared_experts": "moe_num_shared_experts",
    "num_dense_layers": "moe_layer_start_index",
}  # fmt: skip
_OF_ERNIE_MOE: dict[str, Any] = {
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True, "num_experts": 64, "num_experts_per_tok": 6,
    "n_shared_experts": 2, "moe_intermediate_size": 1536, "num_dense_layers": 1, "norm_topk_prob": True,
}  # fmt: skip
_NAMES_OF_LLAMA4 = {
    **{f"mlp.{name}_proj": f"feed_forward.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    "mlp.router": "feed_forward.router", "mlp.experts.gate_up_proj.weight": "feed_forward.experts.gate_up_proj",
    "mlp.experts.down_proj.weight": "feed_forward.experts.down_proj",
}  # fmt: skip
_KEYS_OF_LLAMA4 = _LOCAL | {
    "intermediate_size": "intermediate_size_mlp", "decoder_sparse_step": "interleave_moe_layer_step",
}  # fmt: skip
_OF_LLAMA4: dict[str, Any] = {
    "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_experts": 16, "num_experts_per_tok": 1,
    "n_shared_experts": 1, "decoder_sparse_step": 1, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
    "attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192,
}  # fmt: skip
_OF_MELLUM: dict[str, Any] = {
    "head_dim": 128, "sliding_window": 1024, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896,
    "norm_topk_prob": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
_NORMALISED = {"norm_topk_prob": True}  # llama.cpp divides the weights of experts by their sum always
_BY_NAME = ArchAttention(windows="named", rotated="bases")
_SINKS = {"self_attn.sinks.weight": "self_attn.sinks"}
_NAMES_OF_GRANITE_MOE_SWA = _SINKS | {
    "mlp.router": "block_sparse_moe.router", "mlp.gate_up_proj": "shared_mlp.input_linear",
    "mlp.down_proj": "shared_mlp.output_linear",
    "mlp.experts.gate_up_proj.weight": "block_sparse_moe.experts.gate_up_proj",
    "mlp.experts.down_proj.weight": "block_sparse_moe.experts.down_proj",
}  # fmt: skip
_OF_GRANITE_SWA = {"attention_multiplier": 1.0, "rms_norm_eps": 1e-5, "sliding_window": 128}
_NAMES_OF_EXAONE = {
    **{f"self_attn.{name}_proj": f"attn.attention.{name}_proj" for name in "qkv"},
    "self_attn.o_proj": "attn.attention.out_proj", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
    "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1", "mlp.down_proj": "mlp.c_proj",
    "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f",
}  # fmt: skip
_KEYS_OF_EXAONE = {
    "num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function",
}  # fmt: skip
_NAMES_OF_BAILING = _NAMES_OF_DEEPSEEK | {
    f"{CHOICE}.bias": "mlp.gate.expert_bias", "self_attn.qkv_proj": "attention.query_key_value",
    "self_attn.o_proj": "attention.dense", "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm", "model.embed_tokens": "model.word_embeddings",
}  # fmt: skip
_BAILING: dict[str, Any] = {
    "matrices": ArchMatrices(fused=True), "experts": ArchExperts("sigmoid", "added", grouped=True),
    "names": _NAMES_OF_BAILING, "keys": _DEEPSEEK["keys"] | {
        "n_shared_experts": "num_shared_experts", "scoring_func": "score_function",
    },
}  # fmt: skip
_OF_BAILING: dict[str, Any] = {
    "head_dim": 128, "n_shared_experts": 1, "num_dense_layers": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "rope_theta": 6e5, "partial_rotary_factor": 0.5, "n_group": 8, "topk_group": 4,
}  # fmt: skip
_OF_SARVAM: dict[str, Any] = {
    "head_dim": 64, "n_shared_experts": 1, "moe_intermediate_size": 1024, "num_dense_layers": 1,
    "num_experts_per_tok": 6, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_theta": 8e6,
}  # fmt: skip
_NAMES_OF_HY3 = _EXPERTS | {
    **{f"mlp.{name}_proj": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
    "mlp.router": "mlp.router.gate", f"{CHOICE}.bias": "mlp.expert_bias",
}  # fmt: skip
_OF_HY3: dict[str, Any] = {
    "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0, "num_experts": 192, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "moe_intermediate_size": 1536, "num_dense_layers": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.826,
}  # fmt: skip
_COHERE: dict[str, Any] = {
    "matrices": _PAIRS, "norms": Norms(before_mlp="", kind="layer"), "layers": "parallel",
    "keys": {"output_multiplier": "logit_scale"},
}  # fmt: skip
_OF_COHERE = {"layer_norm_eps": 1e-5, "output_multiplier": 0.0625, "tie_word_embeddings": True}
_KEYS_OF_COHERE_MOE = {
    "output_multiplier": "logit_scale", "moe_intermediate_size": "intermediate_size",
    "intermediate_size": "prefix_dense_intermediate_size", "n_shared_experts": "num_shared_experts",
    "scoring_func": "expert_selection_fn", "num_dense_layers": "first_k_dense_replace",
}  # fmt: skip
_OF_COHERE_MOE = _OF_COHERE | {
    "head_dim": 128, "sliding_window": 4096, "num_dense_layers": 0, "n_shared_experts": 0, "norm_topk_prob": True,
    "scoring_func": "softmax", "shared_expert_combination_strategy": "average",
    "prefix_dense_sliding_window_pattern": 1,
}  # fmt: skip
_NAMES_OF_PHI = {
    "self_attn.o_proj": "self_attn.dense", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2",
    "model.norm": "model.final_layernorm",
}  # fmt: skip
_OF_GEMMA2 = _OF_GEMMA | {"query_pre_attn_scalar": 256, "sliding_window": 4096}

# Source: Transformers 5.5 (LFM3, Muse Glimmer: 5.24), modeling_*.py and configuration_*.py; llama.cpp's
# conversion/*.py and llama-arch.cpp.
ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch(
            "afmoe", norms=_AROUND_MLP, embedding="scaled",
            attention=ArchAttention(windows=4, rotated="sliding", gate="matrix"),
            experts=ArchExperts("sigmoid", "added", grouped=True), names=_NAMES_OF_AFMOE, keys=_KEYS_OF_AFMOE,
            defaults=_OF_AFMOE,
            adjust=adjustments.afmoe,
        ),
        Arch(
            "arcee", "arcee", matrices=_GGUF_PAIRS, ungated=True,
            defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
        ),
        Arch("bailing_moe_v2", "bailingmoe2", **_BAILING, defaults=_OF_BAILING),
        Arch(
            "cohere", "command-r", **_COHERE, defaults=_OF_COHERE | {"rope_theta": 5e5}, switches=("use_qk_norm",),
            adjust_gguf=adjustments.factor_in_gguf,
        ),
        Arch(
            "cohere2", "cohere2", **_COHERE, attention=ArchAttention(windows=4, rotated="sliding"),
            defaults=_OF_COHERE | {"sliding_window": 4096},
            adjust_gguf=adjustments.factor_in_gguf,
        ),
        Arch(
            "cohere2_moe", "cohere2moe", **_COHERE | {"keys": _KEYS_OF_COHERE_MOE},
            attention=ArchAttention(windows="named", rotated="sliding"),
            experts=ArchExperts("sigmoid", "averaged", grouped=True), names=_NAMES_OF_DEEPSEEK,
            defaults=_OF_COHERE_MOE,
            adjust_gguf=adjustments.cohere2_moe_in_gguf,
        ),
        Arch(
            "deepseek_v2", "deepseek2", matrices=_PAIRS, attention=ArchAttention(latent=True),
            experts=ArchExperts("softmax", "added", grouped=True), **_DEEPSEEK, defaults=_OF_DEEPSEEK_V2,
        ),
        Arch(
            "deepseek_v3", "deepseek2", matrices=_PAIRS, attention=ArchAttention(latent=True),
            experts=ArchExperts("sigmoid", "added", grouped=True), **_DEEPSEEK, defaults=_OF_DEEPSEEK_V3,
        ),
        Arch(
            "dots1", "dots1", experts=ArchExperts("sigmoid", "added", grouped=True), **_DEEPSEEK,
            defaults={"num_dense_layers": 0},
        ),
        Arch(
            "ernie4_5", "ernie4_5", matrices=_PAIRS,
            defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
        ),
        Arch(
            "ernie4_5_moe", "ernie4_5-moe", matrices=_PAIRS, experts=ArchExperts("softmax", "added", grouped=True),
            names=_NAMES_OF_DEEPSEEK | {f"{CHOICE}.bias": "mlp.moe_statics.e_score_correction_bias"},
            keys=_KEYS_OF_ERNIE_MOE, defaults=_OF_ERNIE_MOE,
            in_gguf=_NORMALISED,
        ),
        Arch(
            "exaone", "exaone", names=_NAMES_OF_EXAONE, keys=_KEYS_OF_EXAONE,
            defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
        ),
        Arch(
            "exaone4", "exaone4", norms=_AFTER, attention=ArchAttention(windows=4, rotated="sliding"),
            defaults={"sliding_window": 4096, "rms_norm_eps": 1e-5},
        ),
        Arch(
            "exaone_moe", "exaone-moe", attention=ArchAttention(windows=4, rotated="sliding"),
            experts=ArchExperts("sigmoid", "added", grouped=True),
            names=_NAMES_OF_DEEPSEEK | {f"{CHOICE}.bias": "mlp.e_score_correction_bias"},
            keys={"n_shared_experts": "num_shared_experts", "num_dense_layers": "first_k_dense_replace"},
            defaults=_OF_EXAONE_MOE,
        ),
        Arch("gemma", "gemma", norms=_ADDED, embedding="scaled", defaults=_OF_GEMMA),
        Arch(
            "gemma2", "gemma2", norms=_AROUND_ADDED, embedding="scaled", attention=ArchAttention(windows=2),
            defaults=_OF_GEMMA2 | {"final_logit_softcapping": 30.0},
            adjust_gguf=adjustments.gemma_in_gguf(layers_of_27b=46),
        ),
        Arch(
            "gemma3_text", "gemma3", norms=_AROUND_ADDED, embedding="scaled",
            attention=ArchAttention(windows=6, local_theta=True),
            defaults=_OF_GEMMA2 | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
            adjust_gguf=adjustments.gemma_in_gguf(layers_of_27b=62),
        ),
        Arch(
            "glm", "chatglm", matrices=ArchMatrices(interleaved=True, gguf_interleaved=True, fused_mlp=True),
            defaults=_OF_GLM,
        ),
        Arch(
            "glm4", "glm4", matrices=ArchMatrices(interleaved=True, gguf_interleaved=True, fused_mlp=True),
            norms=_SANDWICH, defaults=_OF_GLM,
        ),
        Arch(
            "glm4_moe", "glm4moe", experts=ArchExperts("sigmoid", "added", grouped=True), **_DEEPSEEK,
            defaults=_OF_GLM4_MOE,
        ),
        Arch(
            "glm4_moe_lite", "deepseek2", matrices=_PAIRS, attention=ArchAttention(latent=True),
            experts=ArchExperts("sigmoid", "added", grouped=True), **_DEEPSEEK, defaults=_OF_GLM4_MOE_LITE,
        ),
        Arch(
            "gemma3n_text", "gemma3n", norms=_AROUND, embedding="scaled",
            attention=ArchAttention(windows=5, local_theta=True), layers="streams",
            names={"altup.correct_output_scale.weight": "altup.correct_output_scale"}, defaults=_OF_GEMMA3N,
        ),
        Arch(
            "gemma4_text", "gemma4", norms=_AROUND, embedding="scaled",
            attention=ArchAttention(windows=6, local_theta=True), experts=ArchExperts("softmax", "beside"),
            layers="varied", names=_NAMES_OF_GEMMA4, keys={"num_experts_per_tok": "top_k_experts"}, defaults=_OF_GEMMA4,
            adjust=adjustments.gemma4,
        ),
        Arch(
            "gpt_oss", "gpt-oss", attention=ArchAttention(windows=2), experts=ArchExperts("top_softmax", clamped=True),
            names=_NAMES_OF_GPT_OSS, keys=_LOCAL,
            defaults={"rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "head_dim": 64, "sliding_window": 128},
            adjust_gguf=adjustments.gpt_oss_in_gguf,
        ),
        Arch(
            "granite", "granite", matrices=_GGUF_PAIRS, defaults={"attention_multiplier": 1.0},
            adjust_gguf=adjustments.granite_in_gguf,
        ),
        Arch(
            "granitemoe", "granitemoe", matrices=_GGUF_PAIRS, experts=ArchExperts("top_softmax"),
            names=_NAMES_OF_GRANITE_MOE, keys=_LOCAL, defaults={"attention_multiplier": 1.0},
        ),
        Arch(
            "granitemoehybrid", "granitehybrid", matrices=ArchMatrices(gguf_interleaved=True, fused_mlp=True),
            attention=ArchAttention(rotated="position_embedding_type"), experts=ArchExperts("top_softmax", "added"),
            names=_NAMES_OF_GRANITE_HYBRID, keys=_LOCAL | {"intermediate_size": "shared_intermediate_size"},
            defaults=_OF_GRANITE_HYBRID,
        ),
        Arch(
            "granite_swa", "granite_swa", matrices=_GGUF_PAIRS, attention=_BY_NAME, names=_SINKS,
            defaults=_OF_GRANITE_SWA | {"tie_word_embeddings": True},
        ),
        Arch(
            "granitemoe_swa", matrices=ArchMatrices(gguf_interleaved=True, fused_mlp=True),
            attention=_BY_NAME, experts=ArchExperts("top_softmax", "added"),
            names=_NAMES_OF_GRANITE_MOE_SWA, keys=_LOCAL | {"intermediate_size": "shared_intermediate_size"},
            defaults=_OF_GRANITE_SWA | {"rms_norm_eps": 1e-6, "shared_intermediate_size": 0},
        ),
        Arch("helium", matrices=ArchMatrices(interleaved=True), defaults={"head_dim": 128, "rms_norm_eps": 1e-8}),
        Arch(
            "hy_v3", experts=ArchExperts("sigmoid", "added", grouped=True), names=_NAMES_OF_HY3,
            keys={"n_shared_experts": "num_shared_experts", "routed_scaling_factor": "router_scaling_factor"},
            defaults=_OF_HY3,
        ),
        Arch(
            "hyperclovax", norms=Norms(after_attention="post_norm1", after_mlp="post_norm2"),
            keys={"use_sandwich_norm": "use_post_norm"},
            adjust=adjustments.hyperclovax,
        ),
        Arch(
            "hunyuan_v1_dense", "hunyuan-dense", attention=ArchAttention(normed_after_rope=True),
            names=_NAMES_OF_HUNYUAN, defaults={"rms_norm_eps": 1e-5},
        ),
        Arch(
            "hunyuan_v1_moe", "hunyuan-moe", attention=ArchAttention(normed_after_rope=True),
            experts=ArchExperts("softmax", "added"), names=_NAMES_OF_HUNYUAN_MOE,
            keys={"num_experts_per_tok": "moe_topk", "moe_intermediate_size": "intermediate_size"},
            defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": True},
            in_gguf=_NORMALISED,
        ),
        Arch(
            "lfm2", "lfm2", norms=Norms("operator_norm", "", "ffn_norm", ""), names=_NAMES_OF_LFM2, keys=_KEYS_OF_LFM2,
            defaults=_OF_LFM2,
        ),
        Arch(
            "lfm2_moe", "lfm2moe", norms=Norms("operator_norm", "", "ffn_norm", ""), experts=ArchExperts("sigmoid"),
            names=_NAMES_OF_LFM2_MOE, keys={"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"},
            defaults=_OF_LFM2 | {"block_auto_adjust_ff_dim": False, "num_dense_layers": 2, "norm_topk_prob": True},
        ),
        Arch(
            "lfm3", norms=Norms("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
            attention=ArchAttention(local_theta=True, gate="heads"), names=_NAMES_OF_LFM3,
            keys={"rms_norm_eps": "norm_eps"}, defaults=_OF_LFM3,
        ),
        Arch("internlm3", defaults={"rms_norm_eps": 1e-5}),
        Arch("iquestcoder", defaults={"head_dim": 128, "rms_norm_eps": 1e-5}),
        Arch("llama", "llama", matrices=_GGUF_PAIRS),
        Arch(
            "llama4_text", "llama4", matrices=_PAIRS,
            attention=ArchAttention(rotated="no_rope_layers", normed_after_rope=True, normed_heads=True, chunked=True),
            experts=ArchExperts("input", "added", by_columns=True, grouped=True), names=_NAMES_OF_LLAMA4,
            keys=_KEYS_OF_LLAMA4, defaults=_OF_LLAMA4,
            adjust=adjustments.llama4,
        ),
        Arch(
            "mellum", "mellum", attention=ArchAttention(local_theta=True), experts=ArchExperts("softmax"),
            names=_NAMES_OF_QWEN_MOE, keys={"num_experts": "num_local_experts"}, defaults=_OF_MELLUM,
            in_gguf=_NORMALISED,
        ),
        Arch(
            "minimax_m2", "minimax-m2", experts=ArchExperts("sigmoid", grouped=True),
            names=_NAMES_OF_MIXTRAL | {f"{CHOICE}.bias": "block_sparse_moe.e_score_correction_bias"}, keys=_LOCAL,
            defaults=_OF_MINIMAX_M2,
            adjust=adjustments.minimax_m2, in_gguf=_NORMALISED,
        ),
        Arch("ministral", attention=ArchAttention(windows="all"), defaults={"sliding_window": 4096}),
        Arch(
            "ministral3", "mistral3", matrices=_GGUF_PAIRS, attention=ArchAttention(windows="all"),
            defaults=_OF_MINISTRAL3,
        ),
        Arch("mistral", attention=ArchAttention(windows="all"), defaults={"sliding_window": 4096}),
        Arch(
            "mixtral", matrices=_GGUF_PAIRS, attention=ArchAttention(windows="all"), experts=ArchExperts("softmax"),
            names=_NAMES_OF_MIXTRAL, keys=_LOCAL,
            defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "norm_topk_prob": True},
        ),
        Arch(
            "nemotron", "nemotron", norms=Norms(kind="layer", offset=1.0), ungated=True,
            keys={"layer_norm_eps": "norm_eps"},
            defaults={"hidden_act": "relu2", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        ),
        Arch(
            "nemotron_h", "nemotron_h", attention=ArchAttention(rotated="none"), ungated=True, layers="blocks",
            experts=ArchExperts("sigmoid", "added", grouped=True),
            names=_NAMES_OF_NEMOTRON_H, keys=_KEYS_OF_NEMOTRON_H, defaults=_OF_NEMOTRON_H,
        ),
        Arch(
            "muse_glimmer_text", "muse-glimmer", matrices=_GGUF_PAIRS,
            norms=replace(_AROUND, offset=1.0, plain=("model.norm.weight",)), embedding="normed",
            attention=ArchAttention(windows=-4, rotated="layer_rope_theta", normed_heads=True, gate="matrix"),
            names={"self_attn.output_gate": "self_attn.gate_proj"}, defaults=_OF_MUSE_GLIMMER,
            in_gguf={"qk_scale_factor": 1.0}, adjust_gguf=adjustments.factor_in_gguf,
        ),
        Arch("olmo", norms=Norms(kind="layer"), defaults={"layer_norm_eps": 1e-5}),
        Arch("olmo2", "olmo2", norms=_AFTER, defaults={"rms_norm_eps": 1e-5}, adjust_gguf=adjustments.olmo2_in_gguf),
        Arch(
            "olmo3", "olmo2", norms=_AFTER, attention=ArchAttention(windows=4, local_theta=True),
            defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
        ),
        Arch(
            "olmoe", "olmoe", experts=ArchExperts("softmax"), names=_NAMES_OF_QWEN_MOE,
            keys={"moe_intermediate_size": "intermediate_size"}, defaults={"rms_norm_eps": 1e-5},
        ),
        Arch(
            "phi", "phi2", norms=Norms(before_mlp="", kind="layer"), ungated=True, layers="parallel",
            names=_NAMES_OF_PHI,
            defaults={"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        ),
        Arch(
            "phi3", "phi3", matrices=ArchMatrices(fused=True, fused_mlp=True), attention=ArchAttention(windows="all"),
            defaults={"rms_norm_eps": 1e-5},
            adjust=adjustments.phi3,
        ),
        Arch("qwen2", "qwen2", attention=ArchAttention(windows="late"), defaults={"max_window_layers": 28}),
        Arch(
            "qwen2_moe", "qwen2moe", attention=ArchAttention(windows="late"), experts=ArchExperts("softmax", "gated"),
            names=_NAMES_OF_QWEN_MOE | _SHARED_OF_QWEN,
            keys={"num_experts": "num_local_experts", "intermediate_size": "shared_expert_intermediate_size"},
            defaults={"max_window_layers": 28},
        ),
        Arch(
            "qwen3", "qwen3", attention=ArchAttention(windows="late"),
            defaults={"max_window_layers": 28, "head_dim": 128},
        ),
        Arch("qwen3_5_text", "qwen35", norms=_ADDED, attention=ArchAttention(gate="queries"), defaults=_OF_QWEN3_5),
        Arch(
            "qwen3_5_moe_text", "qwen35moe", norms=_ADDED, attention=ArchAttention(gate="queries"),
            experts=ArchExperts("softmax", "gated"), names=_NAMES_OF_QWEN3_5_MOE,
            keys={"intermediate_size": "shared_expert_intermediate_size"},
            defaults=_OF_QWEN3_5_MOE | {"num_experts": 256, "num_experts_per_tok": 8},
        ),
        Arch(
            "qwen3_next", "qwen3next", norms=_ADDED, attention=ArchAttention(gate="queries"),
            experts=ArchExperts("softmax", "gated"), names=_NAMES_OF_QWEN3_5_MOE,
            keys={"intermediate_size": "shared_expert_intermediate_size"},
            defaults=_OF_QWEN3_5_MOE | {"num_experts": 512, "num_experts_per_tok": 10},
        ),
        Arch(
            "qwen3_moe", "qwen3moe", attention=ArchAttention(windows="late"), experts=ArchExperts("softmax"),
            names=_NAMES_OF_QWEN_MOE, keys={"num_experts": "num_local_experts"}, defaults={"max_window_layers": 28},
            in_gguf=_NORMALISED,
        ),
        Arch("sarvam_moe", **_BAILING, defaults=_OF_SARVAM),
        Arch("seed_oss", "seed_oss", defaults={"head_dim": 128}),
        Arch(
            "smollm3", "smollm3", matrices=_GGUF_PAIRS, attention=ArchAttention(rotated="no_rope_layers"),
            defaults={"rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
        ),
        Arch(
            "solar_open", experts=ArchExperts("sigmoid", "added", grouped=True), names=_NAMES_OF_DEEPSEEK,
            keys={"num_experts": "n_routed_experts"}, defaults=_OF_SOLAR_OPEN,
        ),
        Arch("stablelm", norms=Norms(kind="layer"), defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}),
        Arch(
            "starcoder2", "starcoder2", norms=Norms(kind="layer"), attention=ArchAttention(windows="all"), ungated=True,
            names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}, keys={"layer_norm_eps": "norm_epsilon"},
            defaults={"layer_norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        ),
        Arch(
            "youtu", "deepseek2", matrices=_PAIRS, attention=ArchAttention(latent=True),
            defaults=_OF_LATENT | {"tie_word_embeddings": True},
        ),
    )
}  # fmt: skip
BY_GGUF: dict[str, Arch] = {arch.gguf: arch for arch in reversed(ARCHS.values()) if arch.gguf}  # the first of each
