"""What a GGUF file's metadata says of latent attention and its experts, as config.json does; see `latent`.

Source: keys as llama.cpp's conversion/deepseek.py writes them, now and before it had keys of its own for heads' sizes.
"""

from __future__ import annotations

from typing import Any

from outrider_export.sources.gguf_file import GGUFHeader

_SIGMOID = 2  # how experts are scored, in llama.cpp's numbers
_BIAS = ".exp_probs_b.bias"
_LOG_MULTIPLIER = 0.1  # by which llama.cpp's converter multiplies `mscale_all_dim` of these


def name_of(header: GGUFHeader) -> str:
    """The entry of a file whose architecture is `deepseek2`, by its experts; GLM-4.7-Flash is as DeepSeek V3."""
    if not header.value(".expert_count"):
        return "youtu"
    scoring = header.integer(".expert_gating_func", 0)
    is_sigmoid = scoring == _SIGMOID or (not scoring and any(name.endswith(_BIAS) for name in header.tensors))
    return "deepseek_v3" if is_sigmoid else "deepseek_v2"


def latent_config(header: GGUFHeader) -> dict[str, Any]:
    """The keys that other architectures' files do not have, or whose defaults are others.

    Raises:
        ExportError: when one is missing, or of another type.
    """

    def of(key: str, default: int | None = None) -> int:
        return header.integer(f".{key}", default, least=0)

    rotated, whole = of("rope.dimension_count"), of("attention.key_length_mla", of("attention.key_length"))
    is_softmax = name_of(header) == "deepseek_v2"
    groups = of("expert_group_count", 1)
    return {
        "q_lora_rank": of("attention.q_lora_rank", 0), "kv_lora_rank": of("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": whole - rotated,
        "v_head_dim": of("attention.value_length_mla", of("attention.value_length")),
        "n_shared_experts": of("expert_shared_count", 0), "n_group": groups,
        "topk_group": of("expert_group_used_count", groups),
        "topk_method": "noaux_tc" if not is_softmax else "group_limited_greedy" if groups > 1 else "greedy",
    }  # fmt: skip


def unscaled(rope: dict[str, Any]) -> None:
    """Have the settings of RoPE say `mscale_all_dim` as config.json does."""
    if weight := rope.get("mscale_all_dim"):
        rope["mscale_all_dim"] = weight / _LOG_MULTIPLIER
