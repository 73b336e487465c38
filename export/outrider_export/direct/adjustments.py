"""What the configurations of single architectures say in another way than others': see `Arch.adjust` and `adjust_gguf`.

Each function changes a configuration in place.

Source: as `archs.toml`.
"""

from __future__ import annotations

from typing import Any

from outrider_export.direct.arch import NotDirect
from outrider_export.direct.sizes import FULL

Config = dict[str, Any]
_CHUNKED = "chunked_attention"
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}


def afmoe(config: Config) -> None:
    """Embeddings are scaled by a switch."""
    if not config.get("mup_enabled"):
        config["embedding_multiplier"] = 1.0


def gemma4(config: Config) -> None:
    """The last layer has no window, and newer Transformers say the sizes of such layers one by one."""
    if isinstance(kinds := config.get("layer_types"), list) and kinds:
        config["layer_types"] = [*kinds[:-1], FULL]
    if not config.get("enable_moe_block"):
        config["num_experts"] = 0
    if by_layer := config.get("per_layer_config"):
        full = {i for i, kind in enumerate(config["layer_types"]) if kind == FULL}
        sizes = [by_layer[number] for number in by_layer]
        if {*map(int, by_layer)} != full or any(each != sizes[0] for each in sizes):
            raise NotDirect(f"per_layer_config={by_layer}")
        config["global_head_dim"] = sizes[0].get("head_dim", config["head_dim"])
        config["num_global_key_value_heads"] = sizes[0].get("num_key_value_heads", config["num_key_value_heads"])


def hyperclovax(config: Config) -> None:
    """A factor of logits, where Granite has a divisor."""
    if "logits_scaling" in config:
        config["logits_scaling"] = 1 / config["logits_scaling"]


def llama4(config: Config) -> None:
    """Within a chunk, layers attend to all tokens."""
    kinds = config.get("layer_types")
    if kinds and _CHUNKED not in kinds:
        config.pop("attention_chunk_size", None)
    config.pop("layer_types", None)
    if (of_experts := config.get("moe_layers")) is not None:
        every = range(int(config["num_hidden_layers"]))
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": [i for i in every if i not in of_experts]}
    if not config["decoder_sparse_step"]:
        config |= {"decoder_sparse_step": 1, "num_experts": 0}


def minimax_m2(config: Config) -> None:
    """How many numbers of a head are rotated, not which part of them."""
    if "rotary_dim" in config:
        config["partial_rotary_factor"] = config["rotary_dim"] / config["head_dim"]


def phi3(config: Config) -> None:
    """LongRoPE by older names."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) in ("su", "yarn"):
            config[key] = rope | {"rope_type": "longrope"}


def factor_in_gguf(config: Config) -> None:
    """`logit_scale` multiplies, and does not divide."""
    if "logits_scaling" in config:
        config["output_multiplier"] = config.pop("logits_scaling")


def cohere2_moe_in_gguf(config: Config) -> None:
    """Dense layers have a size of their own."""
    factor_in_gguf(config)
    config["prefix_dense_intermediate_size"] = config["intermediate_size"]
    config |= {"intermediate_size": config["moe_intermediate_size"], "expert_selection_fn": "sigmoid"}


def gemma_in_gguf(config: Config) -> None:
    """llama.cpp knows the scale of queries by the number of layers: that of the 27B is not of the head's size."""
    whole = config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
    is_27b = config.get("num_hidden_layers") == _LAYERS_OF_27B[config["model_type"]]
    config["query_pre_attn_scalar"] = whole if is_27b else config.get("head_dim") or whole


def gpt_oss_in_gguf(config: Config) -> None:
    """Stretched waves are not rounded to whole ones."""
    if "rope_parameters" in config:
        config["rope_parameters"] |= {"truncate": False}


def granite_in_gguf(config: Config) -> None:
    """Some files have layers that do not rotate."""
    if config.get("rope_is_finetuned") is False:
        raise NotDirect("no rotation of queries and keys")


def olmo2_in_gguf(config: Config) -> None:
    """OLMo 3 has the same name."""
    if config["sliding_window"]:
        config["model_type"] = "olmo3"
