"""The keys of published `config.json` files of mixtures of experts, models with states, and others; see `layouts`.

Their tensors have the names by which Transformers saves them. `NAMES` has some that the publishers' files have.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from layout_configs import CONFIGS, KINDS, LATENT, causal

_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "norm_topk_prob": True}
_ROUTED = _EXPERTS | {"n_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "topk_group": 1}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False}
_GRANITE = {
    "attention_bias": False, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_act": "silu",
    "logits_scaling": 6.0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "router_aux_loss_coef": 0.001, "tie_word_embeddings": True,
}  # fmt: skip
_DELTA_NET: dict[str, Any] = {
    "attention_bias": False, "full_attention_interval": 4, "head_dim": 32, "hidden_act": "silu",
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 16, "num_hidden_layers": 4, "rms_norm_eps": 1e-06,
}  # fmt: skip
_QWEN3_5 = _DELTA_NET | {
    "attn_output_gate": True, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "rope_type": "default",
    },
}  # fmt: skip
_SHARED = {"num_experts": 4, "shared_expert_intermediate_size": 48, "router_aux_loss_coef": 0.001}
LATER: dict[str, dict[str, Any]] = {
    "afmoe": causal(
        "afmoe", "AfmoeForCausalLM", global_attn_every_n_layers=4, head_dim=16, hidden_act="silu", layer_types=KINDS,
        load_balance_coeff=0.0005, moe_intermediate_size=48, mup_enabled=True, n_group=1, num_dense_layers=1,
        num_expert_groups=1, num_experts=4, num_experts_per_tok=2, num_hidden_layers=4, num_limited_groups=1,
        num_shared_experts=1, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000, route_norm=True,
        route_scale=2.826, score_func="sigmoid", sliding_window=16, tie_word_embeddings=False, topk_group=1,
    ),
    "arcee": causal(
        "arcee", "ArceeForCausalLM", attention_bias=False, head_dim=16, hidden_act="relu2", mlp_bias=False,
        rms_norm_eps=1e-05, rope_theta=10000.0, tie_word_embeddings=False,
        rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "mscale": 1.0, "original_max_position_embeddings": 32,
            "rope_type": "yarn", "type": "yarn",
        },
    ),
    "deepseek_v3": LATENT | {
        "architectures": ["DeepseekV3ForCausalLM"], "ep_size": 1, "model_type": "deepseek_v3", "moe_layer_freq": 1,
        "n_group": 2, "n_shared_experts": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 1, "q_lora_rank": 40,
        "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16, "type": "yarn",
        },
    },
    "dots1": causal(
        "dots1", "Dots1ForCausalLM", **_ROUTED | {"n_shared_experts": 2}, attention_bias=False,
        first_k_dense_replace=1, head_dim=16, hidden_act="silu", num_hidden_layers=3, num_key_value_heads=4,
        rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000000, routed_scaling_factor=2.5, scoring_func="noaux_tc",
        tie_word_embeddings=False, topk_method="noaux_tc",
    ),
    "ernie4_5_moe": causal(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", hidden_act="silu", moe_capacity=[64, 64, 64], moe_gate="topk",
        moe_intermediate_size=48, moe_k=2, moe_layer_end_index=2, moe_layer_interval=1, moe_layer_start_index=1,
        moe_num_experts=4, moe_num_shared_experts=2, moe_use_aux_free=True, num_hidden_layers=3,
        num_nextn_predict_layers=1, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=500000.0,
        tie_word_embeddings=True, use_bias=False,
    ),
    "exaone_moe": causal(
        "exaone_moe", "ExaoneMoEForCausalLM", **_EXPERTS, first_k_dense_replace=1, head_dim=16, hidden_act="silu",
        is_moe_layer=[False, True, True, True], layer_types=KINDS, n_group=1, num_experts=4, num_hidden_layers=4,
        num_nextn_predict_layers=1, num_shared_experts=1, rms_norm_eps=1e-05, routed_scaling_factor=2.5,
        rope_parameters={"rope_theta": 1000000, "rope_type": "default"}, scoring_func="sigmoid", sliding_window=16,
        sliding_window_pattern="LLLG", tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc",
    ),
    "glm4_moe": causal(
        "glm4_moe", "Glm4MoeForCausalLM", **_ROUTED, attention_bias=True, first_k_dense_replace=1, head_dim=16,
        hidden_act="silu", num_hidden_layers=3, num_nextn_predict_layers=1, partial_rotary_factor=0.5,
        rms_norm_eps=1e-05, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.0,
        tie_word_embeddings=False, use_qk_norm=False,
    ),
    "gpt_oss": causal(
        "gpt_oss", "GptOssForCausalLM", **_LOCAL, attention_bias=True, experts_per_token=2, head_dim=32,
        hidden_act="silu", initial_context_length=16, layer_types=["sliding_attention", "full_attention"],
        rms_norm_eps=1e-05, rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=16, swiglu_limit=7.0,
        tie_word_embeddings=False,
        rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 16,
            "rope_type": "yarn", "truncate": False,
        },
    ),
    "granitemoe": causal("granitemoe", "GraniteMoeForCausalLM", **_GRANITE, **_LOCAL),
    "granitemoehybrid": causal(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", **_GRANITE, **_LOCAL, init_method="mup",
        intermediate_size=48, layer_types=["mamba", "mamba", "attention", "mamba"], mamba_chunk_size=256,
        mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=16, mamba_d_state=12, mamba_expand=2, mamba_n_groups=1,
        mamba_n_heads=8, mamba_proj_bias=False, normalization_function="rmsnorm", num_hidden_layers=4,
        position_embedding_type="nope", shared_intermediate_size=96,
    ),
    "helium": causal(
        "helium", "HeliumForCausalLM", attention_bias=False, head_dim=16, hidden_act="silu", mlp_bias=False,
        num_key_value_heads=4, rms_norm_eps=1e-08, rope_theta=100000.0, tie_word_embeddings=False,
    ),
    "hunyuan_v1_moe": causal(
        "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", attention_bias=False, attention_head_dim=16, cla_share_factor=2,
        class_num=0, head_dim=16, hidden_act="silu", mlp_bias=False, moe_intermediate_size=[96, 96],
        moe_layer_num_skipped=0, moe_topk=[2, 2], norm_type="rms", num_experts=4, num_shared_expert=[1, 1],
        rms_norm_eps=1e-05, rope_theta=10000.0, tie_word_embeddings=True, use_cla=False, use_mixed_mlp_moe=True,
        use_qk_norm=True,
        rope_scaling={
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
    ),
    "lfm2_moe": causal(
        "lfm2_moe", "Lfm2MoeForCausalLM", **_EXPERTS, conv_L_cache=3, conv_bias=False,
        layer_types=["conv", "conv", "full_attention", "conv"], norm_eps=1e-05, num_dense_layers=1, num_experts=4,
        num_hidden_layers=4, rope_theta=1000000.0, routed_scaling_factor=1.0, tie_word_embeddings=True,
        use_expert_bias=True,
    ),
    "lfm3": causal(
        "lfm3", "Lfm3ForCausalLM", conv_L_cache=7, conv_bias=False, head_dim=32, norm_eps=1e-05, num_hidden_layers=4,
        layer_types=["conv", "full_attention", "sliding_attention", "conv"], sliding_window=16,
        tie_word_embeddings=True, use_attention_gate=True, use_sandwich_norm=True,
        rope_parameters={
            "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    ),
    "minimax_m2": causal(
        "minimax_m2", "MiniMaxM2ForCausalLM", **_LOCAL, attn_type_list=[1, 1], head_dim=32, hidden_act="silu",
        intermediate_size=48, mtp_transformer_layers=1, num_mtp_modules=3, qk_norm_type="per_layer",
        rms_norm_eps=1e-06, rope_theta=5000000, rotary_dim=16, router_aux_loss_coef=0.001, router_jitter_noise=0.0,
        scoring_func="sigmoid", shared_intermediate_size=0, shared_moe_mode="sigmoid", sliding_window=None,
        tie_word_embeddings=False, use_mtp=True, use_qk_norm=True, use_routing_bias=True,
    ),
    "ministral": causal(
        "ministral", "MinistralForCausalLM", head_dim=16, hidden_act="silu", layer_types=["sliding_attention"] * 2,
        rms_norm_eps=1e-05, rope_parameters={"rope_theta": 100000000.0, "rope_type": "default"}, sliding_window=16,
        tie_word_embeddings=False,
    ),
    "nemotron": causal(
        "nemotron", "NemotronForCausalLM", attention_bias=False, head_dim=16, hidden_act="relu2", mlp_bias=False,
        norm_eps=1e-05, partial_rotary_factor=0.5, rope_theta=10000, tie_word_embeddings=False,
    ),
    "nemotron_h": causal(
        "nemotron_h", "NemotronHForCausalLM", attention_bias=False, chunk_size=128, conv_kernel=4, expand=2,
        head_dim=24, hybrid_override_pattern="M-M*-M-", layer_norm_epsilon=1e-05, mamba_head_dim=16,
        mamba_hidden_act="silu", mamba_num_heads=8, mamba_proj_bias=False, mlp_bias=False, mlp_hidden_act="relu2",
        n_groups=2, num_hidden_layers=7, num_logits_to_keep=1, rescale_prenorm_residual=True, residual_in_fp32=False,
        rms_norm_eps=1e-05, ssm_state_size=12, tie_word_embeddings=False, time_step_floor=0.0001,
        time_step_limit=[0.0, float("inf")], time_step_max=0.1, time_step_min=0.001, time_step_rank=256,
        torch_dtype="float32", use_bias=False, use_conv_bias=True, use_mamba_kernels=True,
    ),
    "olmoe": causal(
        "olmoe", "OlmoeForCausalLM", attention_bias=False, clip_qkv=None, hidden_act="silu", norm_topk_prob=False,
        num_experts=4, num_experts_per_tok=2, num_key_value_heads=4, output_router_logits=False, rms_norm_eps=1e-05,
        rope_scaling=None, rope_theta=10000.0, router_aux_loss_coef=0.01, tie_word_embeddings=False,
    ),
    "qwen2_moe": CONFIGS["qwen2"] | _EXPERTS | _SHARED | {
        "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "model_type": "qwen2_moe",
        "norm_topk_prob": False, "output_router_logits": False,
    },
    "qwen3_5": causal("qwen3_5_text", "Qwen3_5ForCausalLM", **_QWEN3_5, tie_word_embeddings=True),
    "qwen3_5_moe": causal(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", **_QWEN3_5, **_EXPERTS, **_SHARED, tie_word_embeddings=False
    ),
    "qwen3_next": causal(
        "qwen3_next", "Qwen3NextForCausalLM", **_DELTA_NET, **_EXPERTS, **_SHARED, decoder_sparse_step=1,
        mlp_only_layers=[], output_router_logits=False, partial_rotary_factor=0.25, rope_scaling=None,
        rope_theta=10000000, tie_word_embeddings=False, use_sliding_window=False,
    ),
    "seed_oss": causal(
        "seed_oss", "SeedOssForCausalLM", attention_bias=True, attention_out_bias=False, head_dim=16,
        hidden_act="silu", mlp_bias=False, residual_dropout=0.1, rms_norm_eps=1e-06,
        rope_scaling={"rope_type": "default"}, rope_theta=10000000.0, tie_word_embeddings=False,
    ),
    "solar_open": causal(
        "solar_open", "SolarOpenForCausalLM", **_ROUTED, first_k_dense_replace=0, head_dim=16, hidden_act="silu",
        partial_rotary_factor=1.0, rms_norm_eps=1e-05, rope_theta=1000000, routed_scaling_factor=1.0,
        tie_word_embeddings=False, use_qk_norm=False,
        rope_scaling={"factor": 2.0, "original_max_position_embeddings": 256, "type": "yarn"},
    ),
    "youtu": causal(
        "youtu", "YoutuForCausalLM", attention_bias=False, hidden_act="silu", kv_lora_rank=24, mlp_bias=False,
        num_key_value_heads=4, q_lora_rank=40, qk_nope_head_dim=16, qk_rope_head_dim=8, rms_norm_eps=1e-06,
        rope_interleave=True, rope_scaling=None, rope_theta=1600000, tie_word_embeddings=True, v_head_dim=16,
    ),
    # Converted with PyTorch.
    "apertus": causal(
        "apertus", "ApertusForCausalLM", attention_bias=False, hidden_act="xielu", mlp_bias=False, post_norm=False,
        qk_norm=True, rms_norm_eps=1e-05, rope_theta=12000000, tie_word_embeddings=False,
    ),
    "cohere2": causal(
        "cohere2", "Cohere2ForCausalLM", cache_implementation="hybrid", head_dim=16, hidden_act="silu",
        layer_norm_eps=1e-05, layer_switch=4, logit_scale=0.25, order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj", rope_scaling=None, rope_theta=50000, rotary_pct=1.0, sliding_window=16,
        use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=False,
    ),
    "gpt_bigcode": CONFIGS["gpt2"] | {
        "architectures": ["GPTBigCodeForCausalLM"], "attention_softmax_in_fp32": True, "model_type": "gpt_bigcode",
        "multi_query": True, "n_inner": 96, "scale_attention_softmax_in_fp32": True,
        "activation_function": "gelu_pytorch_tanh",
    },
    "persimmon": causal(
        "persimmon", "PersimmonForCausalLM", hidden_act="relu2", layer_norm_eps=1e-05, partial_rotary_factor=0.5,
        qk_layernorm=True, rope_theta=25000.0, tie_word_embeddings=False, num_key_value_heads=4,
    ),
    "phimoe": causal(
        "phimoe", "PhiMoEForCausalLM", **_LOCAL, attention_bias=True, hidden_act="silu", input_jitter_noise=0.01,
        lm_head_bias=True, rms_norm_eps=1e-05, rope_theta=10000.0, router_jitter_noise=0.01, sliding_window=131072,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
_EXPERT, _SHARED_EXPERT = "mlp.experts.0.gate_proj.weight", "mlp.shared_experts.down_proj.weight"
# Names of tensors in layer 1, or of all.
NAMES: dict[str, tuple[str, ...]] = {
    "afmoe": (_EXPERT, _SHARED_EXPERT, "mlp.router.gate.weight", "mlp.expert_bias", "self_attn.gate_proj.weight"),
    "arcee": ("mlp.up_proj.weight", "mlp.down_proj.weight"),
    "deepseek_v3": (
        _EXPERT, _SHARED_EXPERT, "mlp.gate.e_score_correction_bias", "self_attn.kv_a_proj_with_mqa.weight",
        "self_attn.q_a_layernorm.weight",
    ),
    "dots1": (_EXPERT, _SHARED_EXPERT, "mlp.gate.e_score_correction_bias", "self_attn.q_norm.weight"),
    "ernie4_5_moe": (_EXPERT, _SHARED_EXPERT, "mlp.gate.weight", "mlp.moe_statics.e_score_correction_bias"),
    "exaone_moe": (_EXPERT, _SHARED_EXPERT, "mlp.gate.weight", "self_attn.k_norm.weight"),
    "glm4_moe": (_EXPERT, _SHARED_EXPERT, "mlp.gate.e_score_correction_bias", "self_attn.q_proj.bias"),
    "gpt_oss": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj_bias", "mlp.router.weight", "self_attn.sinks"),
    "granitemoe": ("block_sparse_moe.input_linear.weight", "block_sparse_moe.router.layer.weight"),
    "granitemoehybrid": (
        "block_sparse_moe.output_linear.weight", "mamba.in_proj.weight", "mamba.A_log", "mamba.dt_bias",
        "shared_mlp.input_linear.weight",
    ),
    "helium": ("self_attn.q_proj.weight", "mlp.gate_proj.weight"),
    "hunyuan_v1_moe": (
        _EXPERT, "mlp.gate.wg.weight", "mlp.shared_mlp.up_proj.weight", "self_attn.query_layernorm.weight",
    ),
    "lfm2_moe": ("feed_forward.experts.0.w1.weight", "feed_forward.expert_bias", "conv.in_proj.weight"),
    "lfm3": ("feed_forward.w1.weight", "operator_norm.weight"),
    "minimax_m2": (
        "block_sparse_moe.experts.0.w1.weight", "block_sparse_moe.e_score_correction_bias", "self_attn.q_norm.weight",
    ),
    "ministral": ("self_attn.q_proj.weight",),
    "nemotron": ("input_layernorm.bias", "mlp.up_proj.weight"),
    "nemotron_h": ("embeddings.weight", "mixer.in_proj.weight", "mixer.A_log", "mixer.up_proj.weight", "norm_f.weight"),
    "olmoe": (_EXPERT, "mlp.gate.weight", "self_attn.q_norm.weight"),
    "qwen2_moe": (_EXPERT, "mlp.shared_expert.up_proj.weight", "mlp.shared_expert_gate.weight"),
    "qwen3_5": ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight", "linear_attn.A_log"),
    "qwen3_5_moe": ("mlp.experts.gate_up_proj", "mlp.shared_expert_gate.weight", "linear_attn.dt_bias"),
    "qwen3_next": (_EXPERT, "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
    "seed_oss": ("self_attn.q_proj.bias", "self_attn.o_proj.weight"),
    "solar_open": (_EXPERT, _SHARED_EXPERT, "mlp.gate.e_score_correction_bias"),
    "youtu": ("self_attn.kv_b_proj.weight", "self_attn.q_b_proj.weight"),
}  # fmt: skip
# Tensors of drafters (MTP) that publishers' files have beside.
BESIDE: dict[str, tuple[str, ...]] = {
    "deepseek_v3": ("model.layers.3.eh_proj.weight", "model.layers.3.shared_head.norm.weight"),
    "ernie4_5_moe": ("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_linear_proj.0.weight"),
    "glm4_moe": ("model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight"),
}


def judge(name: str, folder: Path, seed: int) -> Any:
    """The random model in float32 that has the weights of one of these. folder: its files."""
    from transformers import AutoConfig

    from shapes import make_model, random_model, register

    register()
    if name == "nemotron_h":  # Transformers 5.5 does not read its pattern of layers
        return make_model(name, seed, vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"])
    return random_model(AutoConfig.from_pretrained(folder), seed)


def saved_tensors(name: str, folder: Path, seed: int) -> dict[str, Any]:
    """Random weights float32 of one of these, by the names by which Transformers saves them. folder: its files."""
    from transformers.core_model_loading import revert_weight_conversion

    model = judge(name, folder, seed)
    saved = revert_weight_conversion(model, model.state_dict())
    made = {
        each.replace("backbone.embedding.", "backbone.embeddings."): np.ascontiguousarray(tensor.float().numpy())
        for each, tensor in saved.items()
    }
    # Transformers masks groups of experts that are not chosen with 0, which is less than what trained ones have.
    made |= {each: abs(values) for each, values in made.items() if each.endswith("correction_bias")}
    return made | {each: np.ones((4, 4), np.float32) for each in BESIDE.get(name, ())}
