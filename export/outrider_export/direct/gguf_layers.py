"""What a GGUF file's metadata says, as config.json does, of layers that differ in their sizes and of latent attention.

See `sizes` and `latent`. Source: keys as llama.cpp's conversion/gemma.py and conversion/deepseek.py write them, now and
before it had keys of its own for heads' sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider_export.direct.arch import NotDirect
from outrider_export.direct.archs import BY_GGUF
from outrider_export.direct.describe import SLIDING
from outrider_export.direct.sizes import FULL
from outrider_export.sources.gguf_file import GGUFHeader, is_array

_PATTERN = ".attention.sliding_window_pattern"


def varied_config(header: GGUFHeader) -> dict[str, Any]:
    """The keys that differ from those of other architectures.

    Raises:
        NotDirect: when layers differ in a way that config.json could not say.
        ExportError: when a key is missing, or of another type.
    """
    kinds = [SLIDING if each else FULL for each in header.integers(_PATTERN)][: header.num_layers]
    if len(kinds) != header.num_layers:
        raise NotDirect(f"{header.full_key(_PATTERN)} of {len(kinds)} layers for {header.num_layers}")
    if BY_GGUF[header.architecture].layers == "streams":
        return _config_of_streams(header, kinds)
    heads = {kind: _alike(_by_layer(header, ".attention.head_count_kv"), kinds, kind) for kind in (SLIDING, FULL)}
    shared = header.integer(".attention.shared_kv_layers", 0, least=0)
    first = [i for i, kind in enumerate(kinds) if kind == FULL and i < header.num_layers - shared]
    same = bool(first) and f"blk.{first[0]}.attn_v.weight" not in header.tensors
    if heads[FULL] != heads[SLIDING] and not same:
        raise NotDirect("attention.head_count_kv that differs from layer to layer")
    sizes = _by_layer(header, ".feed_forward_length")
    wide = [(2 if i >= header.num_layers - shared else 1) * sizes[0] for i in range(header.num_layers)]
    if sizes != wide and sizes != [sizes[0]] * header.num_layers:
        raise NotDirect("feed_forward_length that differs from layer to layer")
    return {
        "layer_types": kinds, "head_dim": header.integer(".attention.key_length_swa", least=1),
        "global_head_dim": header.integer(".attention.key_length", least=1),
        "num_key_value_heads": heads[SLIDING], "num_global_key_value_heads": heads[FULL], "attention_k_eq_v": same,
        "num_kv_shared_layers": shared, "intermediate_size": sizes[0], "use_double_wide_mlp": sizes == wide,
        "hidden_size_per_layer_input": header.integer(".embedding_length_per_layer_input", 0, least=0),
        "enable_moe_block": bool(header.integer(".expert_count", 0, least=0)),
        "rope_parameters": _rotations(header),
    }  # fmt: skip


def _config_of_streams(header: GGUFHeader, kinds: list[str]) -> dict[str, Any]:
    """The keys of Gemma 3n, whose layers differ in their feed-forward parts only."""
    found: dict[str, Any] = {
        "layer_types": kinds, "head_dim": header.integer(".attention.key_length", least=1),
        "num_key_value_heads": header.integer(".attention.head_count_kv", least=1),
        "num_kv_shared_layers": header.integer(".attention.shared_kv_layers", 15, least=0),
        "intermediate_size": _by_layer(header, ".feed_forward_length"),
        "hidden_size_per_layer_input": header.integer(".embedding_length_per_layer_input", least=1),
        "altup_num_inputs": header.integer(".altup.num_inputs", 4, least=0),
        "altup_active_idx": header.integer(".altup.active_idx", 0, least=0),
        "rope_parameters": _rotations(header),
    }  # fmt: skip
    if (left := header.tensors.get("blk.0.laurel_l.weight")) is not None:
        found["laurel_rank"] = left.shape[0]
    if header.value(".activation_sparsity_scale") is not None:
        found["activation_sparsity_scale"] = [*header.floats(".activation_sparsity_scale")][: header.num_layers]
    return found


def _rotations(header: GGUFHeader) -> dict[str, Any]:
    theta = {FULL: header.value(".rope.freq_base", 1e6), SLIDING: header.value(".rope.freq_base_swa", 1e4)}
    return {kind: {"rope_type": "default", "rope_theta": base} for kind, base in theta.items()}


def _by_layer(header: GGUFHeader, key: str) -> list[int]:
    """A number of each layer, of which there is one for all, or an array."""
    if not is_array(header.value(key)):
        return [header.integer(key, least=1)] * header.num_layers
    found = [*header.integers(key)][: header.num_layers]
    if len(found) != header.num_layers or min(found) < 1:
        raise NotDirect(f"{header.full_key(key)} of {len(found)} layers for {header.num_layers}")
    return found


def _alike(heads: Sequence[int], kinds: Sequence[str], kind: str) -> int:
    """The number of heads that all layers of a kind have."""
    found = {number for number, each in zip(heads, kinds, strict=True) if each == kind} or {*heads}
    if len(found) != 1:
        raise NotDirect("attention.head_count_kv that differs from layer to layer")
    return found.pop()


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
