"""The keys of published `config.json` files, in the spellings of their time; sizes are small."""

from typing import Any

_SIZE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
_USUAL = _SIZE | {"initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16", "attention_dropout": 0.0}
_LLAMA = _USUAL | {
    "_name_or_path": "org/model", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "model_type": "llama",
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "attention_bias": False, "transformers_version": "4.31.0.dev0",
}  # fmt: skip
_V5 = {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
_OLD = ("torch_dtype", "rope_theta", "rope_scaling", "_name_or_path")
_QWEN2 = _USUAL | {
    "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "model_type": "qwen2", "max_window_layers": 21,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
    "use_sliding_window": False,
}  # fmt: skip
_QWEN3 = _QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 32,
    "max_window_layers": 28, "rope_scaling": None, "sliding_window": None,
}  # fmt: skip
_GEMMA = _USUAL | {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "head_dim": 32, "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh", "model_type": "gemma", "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000.0,
}  # fmt: skip
_GEMMA2 = _GEMMA | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 32, "sliding_window": 16,
}  # fmt: skip
_GEMMA3 = {key: value for key, value in _GEMMA.items() if key != "hidden_act"} | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None,
    "cache_implementation": "hybrid", "final_logit_softcapping": None, "num_hidden_layers": 3,
    "query_pre_attn_scalar": 32, "rope_local_base_freq": 10000, "rope_theta": 1000000, "sliding_window": 16,
    "sliding_window_pattern": 3,
}  # fmt: skip
_GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "attention_bias": False,
    "attention_dropout": 0.0, "attention_k_eq_v": False, "enable_moe_block": False, "final_logit_softcapping": 30.0,
    "global_head_dim": 32, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 64,
    "hidden_size_per_layer_input": 16, "intermediate_size": 96, "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "moe_intermediate_size": None,
    "num_attention_heads": 4, "num_experts": None, "num_global_key_value_heads": None, "num_hidden_layers": 6,
    "num_key_value_heads": 1, "num_kv_shared_layers": 3, "rms_norm_eps": 1e-06, "sliding_window": 16,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True, "top_k_experts": None, "use_bidirectional_attention": None,
    "use_double_wide_mlp": True, "vocab_size_per_layer_input": 1024,
}  # fmt: skip
_GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 0,
    "embd_pdrop": 0.1, "eos_token_id": 0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512,
    "resid_pdrop": 0.1, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
_PHI = _USUAL | {"architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_act": "gelu_new"}


LATENT = _USUAL | {
    "attention_bias": False, "first_k_dense_replace": 1, "hidden_act": "silu", "kv_lora_rank": 24,
    "moe_intermediate_size": 48, "n_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3,
    "num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "tie_word_embeddings": False,
    "topk_group": 1, "v_head_dim": 16,
}  # fmt: skip


def causal(kind: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return _USUAL | {"architectures": [architecture], "model_type": kind, **changes}


KINDS = ["sliding_attention"] * 3 + ["full_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "gpt_neo": {
        "activation_function": "gelu_new", "architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo",
        "attention_layers": ["global", "local"], "attention_types": [[["global", "local"], 1]], "hidden_size": 64,
        "intermediate_size": None, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 512, "num_heads": 4,
        "num_layers": 2, "window_size": 256,
    },
    "gptj": _GPT2 | {"architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_inner": None, "rotary_dim": 8},
    "bloom": {
        "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"],
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "layer_norm_epsilon": 1e-05,
        "masked_softmax_fusion": True, "model_type": "bloom", "n_embed": 64, "n_inner": None, "n_layer": 2,
        "num_attention_heads": 4, "offset_alibi": 100, "pretraining_tp": 2, "seq_length": 512,
    },
    "opt": {
        "_remove_final_layer_norm": False, "activation_function": "relu", "architectures": ["OPTForCausalLM"],
        "do_layer_norm_before": True, "ffn_dim": 96, "hidden_size": 64, "max_position_embeddings": 512,
        "model_type": "opt", "num_attention_heads": 4, "num_hidden_layers": 2, "prefix": "</s>",
        "word_embed_proj_dim": 64,
    },
    "gpt_neox": causal(
        "gpt_neox", "GPTNeoXForCausalLM", hidden_act="gelu", layer_norm_eps=1e-05, rotary_emb_base=10000,
        rotary_pct=0.25, use_parallel_residual=True, torch_dtype="float16",
    ),
    "falcon": {  # without max_position_embeddings
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "bias": False, "hidden_size": 64, "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": True,
        "new_decoder_architecture": False, "num_attention_heads": 4, "num_hidden_layers": 2, "parallel_attn": True,
        "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"}, "torch_dtype": "bfloat16",
    },
    "stablelm": causal(
        "stablelm", "StableLmForCausalLM", hidden_act="silu", layer_norm_eps=1e-05, norm_eps=1e-05,
        num_key_value_heads=4, partial_rotary_factor=0.25, rope_theta=10000, tie_word_embeddings=False,
        use_qkv_bias=False,
    ),
    "llama": _LLAMA,
    "llama-v5": {key: value for key, value in _LLAMA.items() if key not in _OLD} | _V5 | {"head_dim": 16},
    "mistral": _LLAMA
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "mixtral": _LLAMA
    | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
        "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 64, "block_ff_dim": 96,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 16, "block_norm_eps": 1e-05, "block_use_swiglu": True,
        "conv_L_cache": 3, "conv_bias": False, "conv_dim": 64, "conv_dim_out": 64, "full_attn_idxs": [1],
        "hidden_size": 64, "initializer_range": 0.02, "max_position_embeddings": 512, "model_type": "lfm2",
        "norm_eps": 1e-05, "num_attention_heads": 4, "num_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "rope_theta": 1000000.0, "tie_embedding": True, "torch_dtype": "bfloat16", "use_cache": True,
        "use_pos_enc": True,
    },
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3-v5": {key: value for key, value in _QWEN3.items() if key not in _OLD}
    | _V5
    | {"layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    "phi": _PHI | {"layer_norm_eps": 1e-05, "partial_rotary_factor": 0.4, "qk_layernorm": False},
    "phi3": causal(
        "phi3", "Phi3ForCausalLM", attention_bias=False, embd_pdrop=0.0, hidden_act="silu",
        original_max_position_embeddings=512, resid_pdrop=0.0, rms_norm_eps=1e-05, rope_scaling=None,
        rope_theta=10000.0, sliding_window=17, tie_word_embeddings=False,
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma3-later": {key: value for key, value in _GEMMA3.items() if key not in ("sliding_window_pattern", "use_cache")}
    | {
        "_sliding_window_pattern": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "unsloth_fixed": True, "use_bidirectional_attention": False, "rope_scaling": None,
    },
    "smollm3": causal(
        "smollm3", "SmolLM3ForCausalLM", attention_bias=False, hidden_act="silu", layer_types=["full_attention"] * 2,
        max_window_layers=28, mlp_bias=False, no_rope_layer_interval=4, no_rope_layers=[1, 0], pretraining_tp=2,
        rms_norm_eps=1e-06, rope_scaling=None, rope_theta=5000000.0, sliding_window=None, use_sliding_window=False,
        tie_word_embeddings=True,
    ),
    "olmo": causal(
        "olmo", "OlmoForCausalLM", attention_bias=False, clip_qkv=None, hidden_act="silu", rope_scaling=None,
        rope_theta=10000.0, tie_word_embeddings=True, num_key_value_heads=4,
    ),
    "olmo2": causal(
        "olmo2", "Olmo2ForCausalLM", attention_bias=False, hidden_act="silu", rms_norm_eps=1e-06, rope_scaling=None,
        rope_theta=500000, tie_word_embeddings=False, num_key_value_heads=4,
    ),
    "granite": causal(
        "granite", "GraniteForCausalLM", attention_bias=False, attention_multiplier=0.015625,
        embedding_multiplier=12.0, hidden_act="silu", logits_scaling=8.0, mlp_bias=False, residual_multiplier=0.22,
        rms_norm_eps=1e-05, rope_scaling=None, rope_theta=5000000.0, tie_word_embeddings=True,
    ),
    "exaone4": causal(
        "exaone4", "Exaone4ForCausalLM", head_dim=16, hidden_act="silu", layer_types=["full_attention"] * 2,
        rms_norm_eps=1e-05, rope_theta=1000000, sliding_window=None, sliding_window_pattern=None,
        tie_word_embeddings=True,
        rope_scaling={
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 128,
            "rope_type": "llama3",
        },
    ),
    "glm": causal(
        "glm", "GlmForCausalLM", attention_bias=True, head_dim=16, hidden_act="silu", partial_rotary_factor=0.5,
        rms_norm_eps=1.5625e-07, rope_theta=10000.0, tie_word_embeddings=False,
    ),
    "glm4": causal(
        "glm4", "Glm4ForCausalLM", attention_bias=True, head_dim=16, hidden_act="silu", partial_rotary_factor=0.5,
        rms_norm_eps=1e-05, rope_theta=10000.0, tie_word_embeddings=False,
    ),
    "olmo3": causal(
        "olmo3", "Olmo3ForCausalLM", attention_bias=False, hidden_act="silu", layer_types=KINDS, num_hidden_layers=4,
        num_key_value_heads=4, rms_norm_eps=1e-06, rope_theta=500000, sliding_window=16, tie_word_embeddings=False,
        rope_scaling={
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 64, "rope_type": "yarn",
        },
    ),
    "ministral3": _SIZE | {
        "attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu", "initializer_range": 0.02,
        "model_type": "ministral3", "rms_norm_eps": 1e-05, "sliding_window": None, "tie_word_embeddings": True,
        "use_cache": True,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 32, "rope_theta": 1000000.0,
            "rope_type": "yarn", "type": "yarn",
        },
    },
    "llama4": _SIZE | {
        "attention_bias": False, "attention_chunk_size": 256, "attention_dropout": 0.0, "attn_scale": 0.1,
        "attn_temperature_tuning": True, "cache_implementation": "hybrid", "floor_scale": 64,
        "for_llm_compressor": False, "head_dim": 16, "hidden_act": "silu", "initializer_range": 0.02,
        "interleave_moe_layer_step": 1, "intermediate_size": 48, "intermediate_size_mlp": 96,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"], "model_type": "llama4_text",
        "moe_layers": [0, 1, 2, 3], "no_rope_layers": [1, 1, 1, 0], "num_experts_per_tok": 1, "num_hidden_layers": 4,
        "num_local_experts": 4, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": True,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 128,
            "rope_type": "llama3",
        },
    },
    "gemma3n": _SIZE | {
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0], "altup_active_idx": 0,
        "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4,
        "attention_bias": False, "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 16, "initializer_range": 0.02,
        "intermediate_size": [96] * 6, "laurel_rank": 8, "model_type": "gemma3n_text", "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 3,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": 16, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size_per_layer_input": 256,
    },
    "qwen3_moe": _QWEN3 | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
        "mlp_only_layers": [], "moe_intermediate_size": 48, "norm_topk_prob": True, "num_experts": 4,
        "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    },
    "muse_glimmer_text": _SIZE | {
        "attention_bias": False, "attention_dropout": 0.0, "final_logit_softcapping": 20.0, "head_dim": 16,
        "hidden_activation": "silu", "layer_rope_theta": [500000.0] * 3 + [0], "layer_types": KINDS,
        "model_type": "muse_glimmer_text", "num_hidden_layers": 4, "output_multiplier": 0.5, "post_norm_eps": 1e-08,
        "qk_scale_factor": 3.87, "rms_norm_eps": 1e-05, "sliding_window": 16, "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    },
    "deepseek_v2": LATENT | {
        "architectures": ["DeepseekV2ForCausalLM"], "aux_loss_alpha": 0.001, "model_type": "deepseek_v2",
        "moe_layer_freq": 1, "n_shared_experts": 2, "norm_topk_prob": False, "pretraining_tp": 1, "q_lora_rank": None,
        "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "seq_aux": True, "topk_method": "greedy",
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 16, "type": "yarn",
        },
    },
    "glm4_moe_lite": LATENT | {
        "architectures": ["Glm4MoeLiteForCausalLM"], "dtype": "bfloat16", "model_type": "glm4_moe_lite",
        "n_shared_experts": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0,
        "q_lora_rank": 40, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 1.8, "topk_method": "noaux_tc",
    },
    "ernie4_5": causal(
        "ernie4_5", "Ernie4_5ForCausalLM", compression_ratio=1.0, head_dim=16, hidden_act="silu", rms_norm_eps=1e-05,
        rope_scaling=None, rope_theta=500000.0, tie_word_embeddings=True, use_bias=False,
    ),
    "exaone": {
        "activation_function": "silu", "architectures": ["ExaoneForCausalLM"], "head_dim": 16, "hidden_size": 64,
        "intermediate_size": 96, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 512, "model_type": "exaone",
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_layers": 2, "rope_theta": 1000000,
    },
    "internlm2": causal("internlm2", "InternLM2ForCausalLM", bias=False, attn_implementation="eager"),
    "internlm3": causal("internlm3", "InternLM3ForCausalLM", bias=False, qkv_bias=False),
    "minicpm": causal("minicpm", "MiniCPMForCausalLM", scale_emb=12, dim_model_base=256, scale_depth=1.4),
    "baichuan": causal("baichuan", "BaichuanForCausalLM", model_max_length=512, z_loss_weight=0),
    "cohere": causal("cohere", "CohereForCausalLM", logit_scale=0.0625, layer_norm_eps=1e-05, use_qk_norm=False),
    "starcoder2": causal("starcoder2", "Starcoder2ForCausalLM", norm_epsilon=1e-05, sliding_window=16, use_bias=True),
    "hunyuan_v1_dense": causal(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", use_qk_norm=True, use_cla=False, head_dim=16,
        attention_bias=False, mlp_bias=False, hidden_act="silu", rms_norm_eps=1e-05, rope_theta=10000.0,
        tie_word_embeddings=True,
        rope_scaling={
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
    ),
    "t5": {
        "architectures": ["T5ForConditionalGeneration"], "d_ff": 96, "d_kv": 16, "d_model": 64,
        "decoder_start_token_id": 0, "dropout_rate": 0.1, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06,
        "model_type": "t5", "n_positions": 512, "num_heads": 4, "num_layers": 2,
        "relative_attention_num_buckets": 32, "task_specific_params": {"summarization": {"num_beams": 4}},
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"], "d_model": 64, "decoder_attention_heads": 4,
        "decoder_ffn_dim": 96, "decoder_layers": 2, "decoder_start_token_id": 1, "encoder_attention_heads": 4,
        "encoder_ffn_dim": 96, "encoder_layers": 2, "forced_decoder_ids": [[1, 2], [2, 3]], "is_encoder_decoder": True,
        "max_source_positions": 1500, "max_target_positions": 448, "model_type": "whisper", "num_mel_bins": 80,
    },
    "marian": {
        "architectures": ["MarianMTModel"], "bad_words_ids": [[0]], "d_model": 64, "decoder_attention_heads": 4,
        "decoder_ffn_dim": 96, "decoder_layers": 2, "decoder_start_token_id": 0, "encoder_attention_heads": 4,
        "encoder_ffn_dim": 96, "encoder_layers": 2, "is_encoder_decoder": True, "max_position_embeddings": 512,
        "model_type": "marian", "static_position_embeddings": True,
    },
}  # fmt: skip
