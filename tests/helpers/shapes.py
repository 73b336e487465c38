"""Tiny random models of many architectures, and what each has to be: see `outrider_export.describe.architectures`."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outrider.bundle import Bundle, DrafterEntry, list_files, read_bundle, write_manifest
from recorded import NAMES, Recorded
from tiny import NUM_TOKENS, TEMPLATE, train_tokenizer

WINDOW = 16  # tokens of all sliding windows here; the texts are longer
NUM_EXPERTS, NUM_ACTIVE = 4, 2
_IDS = {"vocab_size": 448, "bos_token_id": 400, "eos_token_id": 402}
_LLAMA: dict[str, Any] = _IDS | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": 400,
}  # fmt: skip
_ALL_HEADS = _LLAMA | {"num_key_value_heads": 4}
_FOUR = _LLAMA | {"num_hidden_layers": 4}
_SLIDING = _LLAMA | {"sliding_window": WINDOW}
_MIXED = _FOUR | {"sliding_window": WINDOW}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_ACTIVE}
_LFM2 = _FOUR | {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_multiple_of": 16}
_QWEN_MOE = _LLAMA | _EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 1}
_SHARED_MOE = _QWEN_MOE | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 40}
_DELTA_NET: dict[str, Any] = {
    "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}  # fmt: skip
_LOCAL_MOE = _LLAMA | {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_ACTIVE}
_LATENT: dict[str, Any] = _ALL_HEADS | {
    "num_hidden_layers": 3, "kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 48, "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_ACTIVE, "n_shared_experts": 2,
}  # fmt: skip
_GROUPED_MOE = {key: value for key, value in _LATENT.items() if "lora" not in key and "head_dim" not in key} | {
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
_MSCALE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 16, "mscale": 0.707,
    "mscale_all_dim": 0.707, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
_GPT2 = _IDS | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
_GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
_SWASH: dict[str, Any] = {
    "layer_types": ["full_attention", *["sliding_attention"] * 3], "layer_rope_theta": [0, 1e4, 1e4, 1e4],
}  # fmt: skip
_GEMMA = {"head_dim": 32, "tie_word_embeddings": True}
_GEMMA2 = _GEMMA | {
    "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
    "sliding_window": WINDOW,
}  # fmt: skip
_SLIDE, _FULL = "sliding_attention", "full_attention"
_GEMMA4 = _LLAMA | {
    "num_hidden_layers": 6, "layer_types": [_SLIDE, _FULL, _SLIDE, _FULL, _SLIDE, _FULL], "sliding_window": WINDOW,
    "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 448, "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA3N = _LLAMA | {
    "num_hidden_layers": 5, "layer_types": [_SLIDE, _FULL, _SLIDE, _SLIDE, _FULL], "sliding_window": WINDOW,
    "head_dim": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 448,
    "final_logit_softcapping": 3.0, "tie_word_embeddings": True, "laurel_rank": 16,
    "intermediate_size": [96, 64, 96, 96, 96], "activation_sparsity_pattern": [0.8, 0.4, 0.0, 0.0, 0.0],
}  # fmt: skip

# What Transformers' configuration of each architecture is made with.
CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": _MIXED
    | _EXPERTS
    | {
        "head_dim": 16, "num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 1.5, "mup_enabled": True,
        "global_attn_every_n_layers": 4,
    },
    "apertus": _LLAMA,
    "arcee": _LLAMA,
    "bailing_moe_v2": _GROUPED_MOE
    | {"num_hidden_layers": 3, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
    "bloom": _IDS | {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "cohere": _LLAMA | {"logit_scale": 0.5, "tie_word_embeddings": True},
    "cohere2": _MIXED | {"logit_scale": 0.5, "head_dim": 16, "tie_word_embeddings": True},
    "cohere2_moe": _MIXED
    | _EXPERTS
    | {
        "logit_scale": 0.5, "head_dim": 16, "tie_word_embeddings": True, "intermediate_size": 48,
        "prefix_dense_intermediate_size": 96, "num_shared_experts": 0, "expert_selection_fn": "sigmoid",
        "layer_types": [_FULL, _SLIDE, _SLIDE, _FULL], "mlp_layer_types": ["dense", *["sparse"] * 3],
    },
    "deepseek_v2": _LATENT | {"q_lora_rank": None, "routed_scaling_factor": 1.5, "rope_parameters": _MSCALE},
    "deepseek_v3": _LATENT
    | {"n_group": 2, "topk_group": 1, "rope_parameters": _MSCALE | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "dots1": _GROUPED_MOE | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    "ernie4_5": _LLAMA | {"head_dim": 16},
    "ernie4_5_moe": _LLAMA
    | {
        "num_hidden_layers": 3, "moe_num_experts": NUM_EXPERTS, "moe_k": NUM_ACTIVE, "moe_intermediate_size": 48,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
    },
    "exaone": _LLAMA,
    "exaone4": _MIXED | {"sliding_window_pattern": 4},
    "exaone_moe": _MIXED
    | {key: each for key, each in _GROUPED_MOE.items() if key not in ("n_routed_experts", "n_shared_experts")}
    | {"num_hidden_layers": 4, "num_experts": NUM_EXPERTS, "num_shared_experts": 2, "n_group": 1},
    "falcon": _IDS
    | {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "multi_query": True,
        "new_decoder_architecture": False, "max_position_embeddings": 512,
    },
    "gemma": _LLAMA | _GEMMA,
    "gemma2": _LLAMA | _GEMMA2,
    "gemma3_text": _LLAMA
    | _GEMMA
    | {"num_hidden_layers": 3, "sliding_window": WINDOW, "layer_types": [_SLIDE, _SLIDE, _FULL]},
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "glm": _LLAMA | {"head_dim": 32},
    "glm4": _LLAMA | {"head_dim": 32},
    "glm4_moe": _GROUPED_MOE | {"n_shared_experts": 1, "use_qk_norm": True, "routed_scaling_factor": 1.5},
    "glm4_moe_lite": _LATENT | {"n_shared_experts": 1, "rms_norm_eps": 1e-5},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": {name: value for name, value in _ALL_HEADS.items() if name != "num_key_value_heads"},
    "gpt_oss": _SLIDING | _LOCAL_MOE | {"head_dim": 32},
    "gptj": _GPT2 | {"rotary_dim": 8},
    "granite": _LLAMA | _GRANITE,
    "granitemoe": _LOCAL_MOE | _GRANITE,
    "granitemoehybrid": _FOUR
    | _GRANITE
    | {
        "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_ACTIVE, "intermediate_size": 48,
        "shared_intermediate_size": 96, "mamba_n_heads": 8, "mamba_d_head": 16,
        "mamba_n_groups": 2, "mamba_d_state": 12, "layer_types": ["mamba", "mamba", "attention", "mamba"],
    },
    "granite_swa": _MIXED | _GRANITE | _SWASH,
    "granitemoe_swa": _LOCAL_MOE
    | _MIXED
    | _GRANITE
    | _SWASH
    | {"intermediate_size": 48, "shared_intermediate_size": 40},
    "helium": _ALL_HEADS | {"head_dim": 16},
    "hunyuan_v1_dense": _LLAMA | {"head_dim": 16},
    "hunyuan_v1_moe": _LLAMA | {"head_dim": 16, "num_experts": NUM_EXPERTS, "moe_topk": [NUM_ACTIVE] * 2},
    "hy_v3": _GROUPED_MOE | {"n_shared_experts": 1, "routed_scaling_factor": 1.5},
    "hyperclovax": _LLAMA | _GRANITE,
    "internlm3": _LLAMA | {"attention_bias": True, "mlp_bias": True},
    "iquestcoder": _LLAMA | {"head_dim": 32},
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2 | _EXPERTS | {"num_dense_layers": 1, "use_expert_bias": True},
    "lfm3": _FOUR
    | {
        "head_dim": 32, "sliding_window": WINDOW, "conv_L_cache": 5, "tie_word_embeddings": True,
        "layer_types": ["conv", _FULL, _SLIDE, "conv"],
    },
    "llama": _LLAMA,
    "llama4_text": _FOUR
    | {
        "head_dim": 16, "intermediate_size": 48, "intermediate_size_mlp": 96, "num_local_experts": NUM_EXPERTS,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 256, "floor_scale": 16, "attn_scale": 0.5,
    },
    "mellum": _MIXED
    | _EXPERTS
    | {
        "head_dim": 32, "layer_types": [_SLIDE, _SLIDE, _SLIDE, _FULL], "norm_topk_prob": True,
        "rope_parameters": {
            _SLIDE: {"rope_type": "default", "rope_theta": 1e4},
            _FULL: {
                "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 512,
                "attention_factor": 1.2,
            },
        },
    },
    "minimax_m2": _LOCAL_MOE | {"head_dim": 32, "intermediate_size": 48},
    "ministral": _SLIDING | {"head_dim": 16},
    "ministral3": _LLAMA
    | {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 16,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3, "beta_fast": 32.0, "beta_slow": 1.0,
        },
    },
    "mistral": _SLIDING,
    "mixtral": _LOCAL_MOE | {"sliding_window": WINDOW},
    "muse_glimmer_text": _FOUR
    | {
        "head_dim": 32, "sliding_window": WINDOW, "final_logit_softcapping": 3.0, "output_multiplier": 0.4,
        "post_norm_eps": 0.01, "pad_token_id": 0,
    },
    "nemotron": _LLAMA | {"head_dim": 16},
    "nemotron_h": {name: value for name, value in _LLAMA.items() if name != "num_hidden_layers"}
    | {
        "head_dim": 24, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12,
        "time_step_min": 1e-9, "chunk_size": 512,
        "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "mamba", "moe"],
    },
    "olmo": _LLAMA,
    "olmo2": _LLAMA,
    "olmo3": _MIXED,
    "olmoe": {k: v for k, v in (_LLAMA | _EXPERTS).items() if k != "moe_intermediate_size"},
    "opt": _IDS
    | {
        "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 1,
        "max_position_embeddings": 512, "word_embed_proj_dim": 64,
    },
    "persimmon": {name: value for name, value in _ALL_HEADS.items() if name != "num_key_value_heads"},
    "phi": _LLAMA | {"partial_rotary_factor": 0.5},
    "phi3": _SLIDING,
    "phimoe": _LOCAL_MOE,
    "qwen2": _SLIDING | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": _QWEN_MOE | {"shared_expert_intermediate_size": 48},
    "qwen3": _LLAMA | {"head_dim": 32},
    "qwen3_5_moe_text": _FOUR | _DELTA_NET | _SHARED_MOE,
    "qwen3_5_text": _FOUR | _DELTA_NET,
    "qwen3_moe": _QWEN_MOE | {"head_dim": 32},
    "qwen3_next": _FOUR | _DELTA_NET | _SHARED_MOE,
    "sarvam_moe": _GROUPED_MOE | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5},
    "seed_oss": _LLAMA | {"head_dim": 16},
    "smollm3": _FOUR | {"no_rope_layer_interval": 2},
    "solar_open": {key: each for key, each in _GROUPED_MOE.items() if key != "first_k_dense_replace"}
    | {"routed_scaling_factor": 1.5, "n_group": 1},
    "stablelm": _LLAMA | {"partial_rotary_factor": 0.5},
    "starcoder2": _SLIDING,
    "youtu": {key: _LATENT[key] for key in _LATENT if "expert" not in key and "first" not in key},
}  # fmt: skip

# Gemma 4's larger models: keys and values of one product where attention is full, none shared, no inputs by layer.
GEMMA4_DENSE: dict[str, Any] = {
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
    "num_global_key_value_heads": 1, "use_double_wide_mlp": False, "use_bidirectional_attention": "vision",
}  # fmt: skip
GEMMA4_EXPERTS = GEMMA4_DENSE | {
    "enable_moe_block": True, "num_experts": NUM_EXPERTS, "top_k_experts": NUM_ACTIVE, "moe_intermediate_size": 48,
}  # fmt: skip

NEMOTRON_EXPERTS: dict[str, Any] = {
    "n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_ACTIVE, "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 1.5,
}  # fmt: skip

# Changes for ONNX, which has no windows.
IN_ONNX: dict[str, dict[str, Any]] = {
    "exaone4": {"sliding_window": None, "layer_types": [_FULL] * 4},
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "stablelm": {"hidden_size": 128, "partial_rotary_factor": 0.5},  # 16 numbers of each head
}


def make_model(architecture: str, seed: int = 0, **changes: Any) -> Any:
    """A random torch model in float32 of an architecture's small configuration, or what is recorded of one."""
    from transformers import AutoConfig

    if architecture in NAMES:
        return Recorded.of(architecture, changes)
    given = CONFIGS.get(architecture, _LLAMA) | changes
    return random_model(AutoConfig.for_model(architecture, **given), seed, experts="n_routed_experts" in changes)


def random_model(config: Any, seed: int, *, experts: bool = False) -> Any:
    """A random torch model in float32, with weights large enough for its logits to differ.

    experts: whether a Nemotron-H has them instead of dense feed-forward parts.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    if config.model_type == "nemotron_h" and not experts:
        _with_dense_parts(model)
    if config.model_type == "deepseek_v2":
        mend_deepseek_v2(model)
    for name, parameter in model.named_parameters():
        if name.endswith(
            "A_log"
        ):  # a token forgets from 0.2 to 40 % of a state: at once, faults of states would not show
            parameter.data = torch.linspace(-6, -1, len(parameter))
        elif parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith(("expert_bias", "correction_bias", "layer_scalar")):
            buffer += 0.3 * torch.randn_like(buffer)
    return model


def _with_dense_parts(model: Any) -> None:
    """Give a Nemotron-H dense feed-forward parts, which its code in Transformers 5.5 has, but its configuration not."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMLP

    for layer in model.model.layers:
        if layer.block_type == "moe":
            layer.mixer = NemotronHMLP(model.config)
    pattern = "".join({"mamba": "M", "moe": "-", "attention": "*"}[layer.block_type] for layer in model.model.layers)
    save = model.save_pretrained

    def save_as_published(folder: Path, **options: Any) -> None:
        save(folder, **options)
        path = Path(folder) / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        del config["layers_block_type"]
        config |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
        path.write_text(json.dumps(config), encoding="utf-8")

    model.save_pretrained = save_as_published


def mend_deepseek_v2(model: Any) -> None:
    """Have a DeepSeek V2 with YaRN scale products of queries and keys as its publishers do, and find its groups.

    Transformers 5.5 does neither: see its pull request 47435 for the first. Later ones do.
    """
    rope = model.config.rope_parameters
    weight, is_yarn = rope.get("mscale_all_dim"), rope["rope_type"] == "yarn"
    for layer in model.model.layers:
        if weight and is_yarn:
            layer.self_attn.scaling *= (0.1 * weight * math.log(rope["factor"]) + 1) ** 2
        layer.mlp.num_experts = model.config.n_routed_experts


def do_not_scale_windows(model: Any) -> None:
    """Have an OLMo 3's layers with a sliding window rotate without scaling, as in training.

    Transformers 5.0 to 5.5 scales all of them: see its issue 45945. Later ones do not.
    """
    config = type(model.config)(**{**model.config.to_dict(), "rope_parameters": None})
    config.rope_parameters = {"rope_type": "default", "rope_theta": model.config.rope_parameters["rope_theta"]}
    plain = type(model.model.rotary_emb)(config)

    def rotate(_: Any, inputs: Any, options: dict[str, Any]) -> Any:
        return inputs, options | {"position_embeddings": plain(inputs[0], options["position_ids"])}

    for layer, kind in zip(model.model.layers, config.layer_types, strict=True):
        if kind == _SLIDE:
            layer.register_forward_pre_hook(rotate, with_kwargs=True)


def save_model(model: Any, folder: Path) -> Path:
    """Write a checkpoint with a tokenizer."""
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(), chat_template=TEMPLATE, **special)
    wrapped.save_pretrained(folder)
    return folder


def with_noisy_draft(bundle: Bundle, noise: float = 0.1) -> Bundle:
    """The bundle with a draft model of the same architecture: the main model, with other weights. Written in place."""
    import openvino as ov

    main = bundle.manifest.main
    model = ov.Core().read_model(bundle.model_path(main))
    rng = np.random.default_rng(1)
    for node in model.get_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.f32 or node.data.ndim != 2:
            continue
        if min(node.data.shape) > 1:
            drawn = node.data * rng.normal(1, noise, node.data.shape).astype(np.float32)
            made = ov.opset13.constant(drawn)
            for target in node.output(0).get_target_inputs():
                target.replace_source_output(made.output(0))
    (bundle.folder / "draft").mkdir()
    ov.save_model(model, bundle.folder / "draft" / "openvino_model.xml", compress_to_fp16=False)
    entry = DrafterEntry("draft", "draft_model", msgspec.structs.replace(main, folder="draft"))
    (bundle.folder / "outrider.json").unlink()
    manifest = msgspec.structs.replace(bundle.manifest, drafters=(entry,), files=list_files(bundle.folder))
    write_manifest(bundle.folder, manifest)
    return read_bundle(bundle.folder)


def logits_of(model: Any, token_ids: Sequence[int]) -> Any:
    """A torch model's logits, float32 [n, vocab]."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([[*token_ids]])).logits[0].float().numpy()


def hidden_states(model: Any, token_ids: Sequence[int]) -> tuple[Any, Any]:
    """Hidden states float32 [n, hidden] after a torch model's first layer, and after its last norm."""
    import torch

    with torch.no_grad():
        found = model(torch.tensor([[*token_ids]]), output_hidden_states=True).hidden_states
    return found[1][0].numpy(), found[-1][0].numpy()


def continued(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Transformers' own greedy answer of `count` tokens of the vocabulary, which is smaller than the output matrix."""
    import torch

    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    padding = [*range(NUM_TOKENS, _IDS["vocab_size"])]
    with torch.no_grad():
        made = model.generate(torch.tensor([[*prompt]]), max_new_tokens=count, suppress_tokens=padding, **options)
    answer: list[int] = made[0, len(prompt) :].tolist()
    return answer


def cosines(found: Any, expected: Any) -> Any:
    """The cosine of each row with the same row of another array."""
    return (found * expected).sum(axis=1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)


def same_but_for_ties(found: Sequence[int], expected: Sequence[int], logits: Any, margin: float = 1e-3) -> bool:
    """Whether two greedy answers are the same up to where two tokens are as likely, after which they may go apart.

    logits: of the expected answer, float32 [n, vocab]: row i is that which token i was chosen from.
    """
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours != theirs:
            return bool(logits[i, theirs] - logits[i, ours] < margin)
    return True
