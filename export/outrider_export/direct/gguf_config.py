"""What a GGUF file's metadata says, as a checkpoint's config.json does.

Source: the GGUF specification; keys as llama.cpp's convert_hf_to_gguf.py writes them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_export.direct.describe import FULL, Decoder, NotDirect, describe
from outrider_export.direct.forms import BY_GGUF
from outrider_export.direct.rope import Rope
from outrider_export.gguf_file import GGUFHeader, is_array

# config.json's names of what the metadata has under the architecture's name.
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
}
_ROPE_KEYS = {
    "rope_type": "type",
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
# Settings that change what is computed, in a way that the graph does not have.
_REFUSED = ("expert_count", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor")
_SHORT, _DIVISORS = "rope_factors_short.weight", "rope_freqs.weight"
_LARGEST_GEMMA = (("gemma2", 46), ("gemma3_text", 62))  # 27B, whose scale is not of the head's size


def decoder_of(header: GGUFHeader) -> Decoder:
    """The decoder of a GGUF file.

    Raises:
        NotDirect: when it is one that is not converted without PyTorch.
    """
    decoder = describe(config_of(header))
    if _DIVISORS in header.tensors:  # Llama 3's scaling of frequencies
        whole, divisors = decoder.ropes[FULL], _floats(header, _DIVISORS)
        if divisors.shape != whole.frequencies.shape:
            raise NotDirect(f"{_DIVISORS} with {len(divisors)} numbers for {len(whole.frequencies)} frequencies")
        divided = Rope(whole.frequencies / divisors, whole.scale)
        decoder = dataclasses.replace(decoder, ropes={**decoder.ropes, FULL: divided})
    return decoder


def config_of(header: GGUFHeader) -> dict[str, Any]:
    """What config.json says, from a GGUF file's metadata.

    Raises:
        NotDirect: for an architecture that is not in `forms`, or one of its settings.
    """
    form = BY_GGUF.get(header.architecture)
    if form is None:
        raise NotDirect(f"the architecture {header.architecture!r} in a GGUF file")

    def find(keys: dict[str, str], prefix: str = "") -> dict[str, Any]:
        found = {ours: header.metadata.get(header.of_architecture(prefix + theirs)) for ours, theirs in keys.items()}
        if differing := next((keys[ours] for ours, value in found.items() if is_array(value)), None):
            raise NotDirect(f"{differing} that differs from layer to layer")
        return {ours: value for ours, value in found.items() if value is not None}

    for key in _REFUSED:
        if value := header.metadata.get(header.of_architecture(key)):
            raise NotDirect(f"{key}={value!r}" if not is_array(value) else key)
    if header.metadata.get(header.of_architecture("rope.scaling.finetuned")) is False and form.name == "granite":
        raise NotDirect("no rotation of queries and keys")
    config = {"sliding_window": None} | find(_KEYS)
    if form.name == "olmo2" and config["sliding_window"]:  # OLMo 3 has the same name, and other rotations
        raise NotDirect("sliding windows")
    if "num_hidden_layers" in config:
        config["num_hidden_layers"] = header.num_layers
    config |= {"model_type": form.name, "tie_word_embeddings": "output.weight" not in header.tensors}
    heads, hidden = config.get("num_attention_heads") or 1, config.get("hidden_size", 0)
    size = config.get("head_dim") or hidden // heads
    rotated = header.metadata.get(header.of_architecture("rope.dimension_count"))
    if rotated and size:
        config["partial_rotary_factor"] = rotated / size
    if form.name in ("gemma2", "gemma3_text"):  # llama.cpp knows the scale by the number of layers
        is_largest = (form.name, config.get("num_hidden_layers")) in _LARGEST_GEMMA
        config["query_pre_attn_scalar"] = hidden // heads if is_largest else size
    rope = find(_ROPE_KEYS, "rope.scaling.")
    legacy = header.metadata.get(header.of_architecture("rope.scale_linear"))
    if legacy and "factor" not in rope:
        rope["factor"] = legacy
    if rope.get("factor", 1) not in (0, 1) and "rope_type" not in rope:
        rope["rope_type"] = "linear"  # which llama.cpp takes it for
    if _SHORT in header.tensors:
        rope |= {"rope_type": "longrope", "short_factor": _floats(header, _SHORT).tolist()}
    if rope.get("rope_type", "none") != "none":
        config["rope_parameters"] = rope
    return config


def _floats(header: GGUFHeader, name: str) -> NDArray[np.float32]:
    """A small tensor, float32 [n].

    Raises:
        NotDirect: when it is of another type.
    """
    tensor = header.tensors[name]
    if tensor.type != "F32" or len(tensor.shape) != 1:
        raise NotDirect(f"{name} as {tensor.type} {[*tensor.shape]}")
    return np.fromfile(header.path, "<f4", tensor.num_weights, offset=header.data_start + tensor.offset)
