"""What a checkpoint's layers are, read from Transformers' configuration: sliding windows and mixtures of experts."""

from __future__ import annotations

from typing import Any

# Whose sliding window, if one is set, is that of all layers. Others say it by layer, in layer_types.
_ALL_LAYERS = ("ministral", "mistral", "mixtral", "phi3", "phimoe", "qwen2_moe", "qwen3_moe", "starcoder2")


def describe_layers(config: Any) -> dict[str, Any]:
    """The fields of `Geometry` that a loaded model's configuration tells: those of its layers."""
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((getattr(config, name) for name in experts if getattr(config, name, None)), 0)
    return {
        "sliding_windows": windows_of_config(config),
        "num_experts": num_experts,
        "num_active_experts": (getattr(config, "num_experts_per_tok", None) or 0) if num_experts else 0,
    }


def windows_of_config(config: Any) -> list[int]:
    """The sliding window of each layer, in tokens; 0 where a layer attends to all tokens before it."""
    window = getattr(config, "sliding_window", None) or 0
    if kinds := getattr(config, "layer_types", None):
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    is_used = config.model_type in _ALL_LAYERS and getattr(config, "use_sliding_window", True)
    return [window if is_used else 0] * config.num_hidden_layers
