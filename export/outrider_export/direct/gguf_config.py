"""What a GGUF file's metadata says, as a checkpoint's config.json does.

Source: the GGUF specification; keys as in `gguf_names.toml`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_export.direct.arch import Arch, NotDirect
from outrider_export.direct.archs import ARCHS, BY_GGUF
from outrider_export.direct.decoder import Decoder
from outrider_export.direct.describe import SLIDING, describe
from outrider_export.direct.gguf_layers import latent_config, name_of, unscaled, varied_config
from outrider_export.direct.rope import Rope
from outrider_export.direct.sizes import FULL, MLP, MOE
from outrider_export.sources.gguf_file import DIVISORS, GGUFHeader, is_array
from outrider_export.sources.gguf_names import to_gguf

_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
# The kind of layers without keys and values, in `layer_types`.
_STATES = {
    "lfm2": "conv", "lfm2moe": "conv", "granitehybrid": "mamba", "nemotron_h": "mamba", "nemotron_h_moe": "mamba",
}  # fmt: skip
_INNER, _COUNT = "inner_size", "time_step_rank"  # numbers of all heads together, and heads
_DELTA_NET = {
    "linear_num_value_heads": _COUNT, "linear_num_key_heads": "group_count", "linear_key_head_dim": "state_size",
    "linear_conv_kernel_dim": "conv_kernel",
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": _COUNT, "mamba_n_groups": "group_count", "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
}  # fmt: skip
_RECURRENCES = {
    "granitemoehybrid": _MAMBA, "nemotron_h": _MAMBA,
    "qwen3_5_text": _DELTA_NET, "qwen3_5_moe_text": _DELTA_NET, "qwen3_next": _DELTA_NET,
}  # fmt: skip
# By the architecture of a file, that of files with experts which has another name in config.json.
_WITH_EXPERTS = {"llama": "mixtral", "granite_swa": "granitemoe_swa"}
_NO_NORMS = 128  # experts of the Llama 4 that has no norms of queries and keys


def decoder_of(header: GGUFHeader) -> Decoder:
    """The decoder of a GGUF file.

    Raises:
        NotDirect: when it is one that is not converted without PyTorch.
    """
    decoder = describe(config_of(header))
    matrices = decoder.arch.matrices
    if header.tensors.keys() & {"blk.0.ffn_gate.weight", "blk.0.ffn_gate_shexp.weight"}:  # taken apart by llama.cpp
        matrices = dataclasses.replace(matrices, fused_mlp=False)
    if "blk.0.attn_qkv.weight" in header.tensors and not decoder.states:  # of ChatGLM's own layout
        matrices = dataclasses.replace(matrices, fused=True)
    decoder = dataclasses.replace(decoder, arch=dataclasses.replace(decoder.arch, matrices=matrices))
    if DIVISORS in header.tensors:  # Llama 3's scaling of frequencies
        whole, divisors = decoder.ropes[FULL], _floats(header, DIVISORS)
        if divisors.shape != whole.frequencies.shape:
            raise NotDirect(f"{DIVISORS} with {len(divisors)} numbers for {len(whole.frequencies)} frequencies")
        divided = Rope(whole.frequencies / divisors, whole.scale)
        decoder = dataclasses.replace(decoder, ropes={**decoder.ropes, FULL: divided})
    return decoder


def arch_of(header: GGUFHeader) -> Arch | None:
    """The first entry of a GGUF file's architecture."""
    return BY_GGUF.get(header.architecture.removesuffix("_moe"))


def config_of(header: GGUFHeader) -> dict[str, Any]:
    """What config.json says, from a GGUF file's metadata.

    Raises:
        NotDirect: for an architecture that is not in `archs`, or one of its settings.
    """
    arch = _entry_of(header)
    if value := header.value(".rope.scaling.yarn_ext_factor"):  # which the graph does not have
        raise NotDirect(f"rope.scaling.yarn_ext_factor={value!r}")
    config = {"sliding_window": None, "decoder_sparse_step": 1, "block_auto_adjust_ff_dim": False} | kv_heads_of(header)
    config |= _found(header, {ours: theirs for ours, theirs in to_gguf("keys").items() if config.get(ours) is None})
    if arch.experts.grouped:
        config = {"norm_topk_prob": False, "routed_scaling_factor": 1.0} | config
    if arch.attention.latent:
        config |= latent_config(header)
    if config.get("num_experts") and not arch.experts.router:
        raise NotDirect(f"expert_count={config['num_experts']!r}")
    config |= arch.in_gguf
    if arch.attention.chunked:
        if config["sliding_window"] == 0:
            raise NotDirect("attention.sliding_window=0")
        config["use_qk_norm"] = config["num_experts"] != _NO_NORMS
        config["intermediate_size_mlp"] = config["intermediate_size"]
        config["intermediate_size"] = config["moe_intermediate_size"]
    config |= _windows_of(header)
    if arch.attention.rotated == "bases":
        config |= _rotated_layers_of(header)
    config |= _recurrence_of(header, arch.name)
    if "num_hidden_layers" in config:
        config["num_hidden_layers"] = header.num_layers
    config |= {"model_type": arch.name, "tie_word_embeddings": "output.weight" not in header.tensors}
    heads, hidden = config.get("num_attention_heads") or 1, config.get("hidden_size", 0)
    size = config.get("head_dim") or hidden // heads
    rotated = header.value(".rope.dimension_count")
    if rotated and size and not arch.varied and not arch.attention.latent:
        config["partial_rotary_factor"] = rotated / size
    if (rope := _rope_of(header, arch, config.pop("temperature_scale", 0))) is not None:
        config["rope_parameters"] = rope
    if arch.adjust_gguf is not None:
        arch.adjust_gguf(config)
    return config


def _entry_of(header: GGUFHeader) -> Arch:
    arch = arch_of(header)
    if header.architecture in _WITH_EXPERTS and header.value(".expert_count"):
        arch = ARCHS[_WITH_EXPERTS[header.architecture]]
    if arch is None:
        raise NotDirect(f"the architecture {header.architecture!r} in a GGUF file")
    return ARCHS[name_of(header)] if arch.attention.latent else arch


def _found(header: GGUFHeader, keys: dict[str, str], prefix: str = "") -> dict[str, Any]:
    """What the metadata says of these keys, by their names in config.json."""
    found = {ours: header.value(f".{prefix}{theirs}") for ours, theirs in keys.items()}
    if differing := next((keys[ours] for ours, value in found.items() if is_array(value)), None):
        raise NotDirect(f"{differing} that differs from layer to layer")
    return {ours: value for ours, value in found.items() if value is not None}


def _rope_of(header: GGUFHeader, arch: Arch, growth: float) -> dict[str, Any] | None:
    """The `rope_parameters`; None where the metadata says nothing of them. growth: of queries with their position."""
    rope = _found(header, to_gguf("rope_keys"), "rope.scaling.")
    legacy = header.value(".rope.scale_linear")
    if legacy and "factor" not in rope:
        rope["factor"] = legacy
    if rope.get("factor", 1) not in (0, 1) and "rope_type" not in rope:
        rope["rope_type"] = "linear"  # which llama.cpp takes it for
    if arch.varied and rope.get("rope_type", "none") != "none":
        raise NotDirect(f"RoPE of the kind {rope['rope_type']!r}")
    if _SHORT in header.tensors:
        rope |= {"rope_type": "longrope", "short_factor": _floats(header, _SHORT).tolist()}
        rope |= {"long_factor": _floats(header, _LONG).tolist()} if _LONG in header.tensors else {}
    if arch.attention.latent:
        unscaled(rope)
    if "mscale_all_dim" in rope:  # as Ministral 3's
        rope["mscale"] = rope["mscale_all_dim"]
    if (scale := rope.pop("yarn_attention_factor", None)) is not None:
        rope.setdefault("attention_factor", scale)
    if growth:
        rope["llama_4_scaling_beta"] = growth
    if rope.get("rope_type", "none") != "none":
        return rope
    return {"rope_type": "default"} if arch.defaults.get("rope_parameters") else None


def _windows_of(header: GGUFHeader) -> dict[str, Any]:
    """Which layers have a sliding window, as config.json says it; {} if the metadata does not."""
    pattern = header.value(".attention.sliding_window_pattern")
    if isinstance(pattern, (list, memoryview)):
        return {"layer_types": [SLIDING if each else FULL for each in pattern[: header.num_layers]]}
    return {} if pattern is None or is_array(pattern) else {"sliding_window_pattern": pattern}


def _rotated_layers_of(header: GGUFHeader) -> dict[str, Any]:
    """Which layers rotate, as config.json says it; {} if the metadata does not."""
    pattern = header.value(".attention.rope_pattern")
    if not isinstance(pattern, (list, memoryview)):
        return {}
    base = header.value(".rope.freq_base", 10_000.0)
    return {"layer_rope_theta": [base if each else 0 for each in pattern[: header.num_layers]]}


def _recurrence_of(header: GGUFHeader, name: str) -> dict[str, Any]:
    """What config.json says of recurrences, for the architecture `name`; {} for one without.

    Raises:
        ExportError: when the metadata lacks a size.
    """
    keys = _RECURRENCES.get(name)
    if keys is None:
        return {}
    found = {ours: header.integer(f".ssm.{theirs}", least=1) for ours, theirs in keys.items()}
    inner, count = (header.integer(f".ssm.{key}", least=1) for key in (_INNER, _COUNT))
    found["linear_value_head_dim" if name.startswith("qwen") else "mamba_d_head"] = inner // count
    rotated = header.flag(".rope.scaling.finetuned", False)
    return found | {
        "num_local_experts": header.integer(".expert_count", 0),
        "position_embedding_type": "rope" if rotated else None,
    }


def kv_heads_of(header: GGUFHeader) -> dict[str, Any]:
    """What config.json says of layers without keys and values, of which the metadata has no heads; {} if all have some.

    Of Gemma 4, what `varied_config` finds.

    Raises:
        NotDirect: when layers have different numbers of heads.
    """
    arch = arch_of(header)
    if arch is not None and arch.varied:
        return varied_config(header)
    found = header.value(".attention.head_count_kv")
    if not isinstance(found, memoryview):
        return {}
    counts = {*found} - {0}
    state = _STATES.get(header.architecture)
    if len(counts) != 1 or (state is None and 0 in found):
        raise NotDirect("attention.head_count_kv that differs from layer to layer")
    layers = found[: header.num_layers]  # MTP modules may be after them
    kinds: dict[str, Any] = {} if state is None else {"layer_types": [FULL if count else state for count in layers]}
    widths = header.value(".feed_forward_length")
    if arch is not None and arch.layers == "blocks" and isinstance(widths, memoryview) and len(widths) == len(found):
        has_experts = header.architecture.endswith("_moe")
        feeding = MOE if has_experts else MLP
        of_blocks = [feeding if width else kind for width, kind in zip(widths, kinds["layer_types"], strict=False)]
        kinds = {"layers_block_type": of_blocks, "intermediate_size": max(widths)}
    return {"num_key_value_heads": counts.pop(), **kinds}


def _floats(header: GGUFHeader, name: str) -> NDArray[np.float32]:
    """A small tensor, float32 [n].

    Raises:
        NotDirect: when it is of another type.
    """
    tensor = header.tensors[name]
    if tensor.type != "F32" or len(tensor.shape) != 1:
        raise NotDirect(f"{name} as {tensor.type} {[*tensor.shape]}")
    return np.fromfile(tensor.path, "<f4", tensor.num_weights, offset=tensor.begin)
