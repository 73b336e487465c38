"""Drafters in GGUF files, as llama.cpp's converter writes them: EAGLE-3, DFlash, DFlash 2 and DSpark.

    if kind_of_file(path) is not None:
        config, tensors = read_file(path)    # as a checkpoint has them

`general.architecture` is `eagle3` or `dflash`; of the latter, DFlash 2 has a selector, and DSpark a Markov head.
`target_layers` are layers of the main model whose inputs are read, where DFlash's checkpoints name those whose outputs
are. The tokens of a reduced vocabulary (`d2t`) are ids, where checkpoints have differences. Queries and keys of EAGLE-3
are stored for rotating neighbours.

Source: llama.cpp, conversion/llama.py and qwen.py, src/models/eagle3.cpp and dflash.cpp, by their state of August 2026.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider_export.sources.gguf_file import DIVISORS, GGUFHeader
from outrider_export.sources.gguf_names import from_gguf, to_gguf
from outrider_export.sources.gguf_reader import read_header

_EAGLE, _DFLASH = "eagle3", "dflash"
_MARKOV, _SELECTOR, _CONFIDENCE, _D2T = "markov_w1.weight", "selector_hidden.weight", "conf_proj.weight", "d2t"
_CLASSES = {
    "eagle3": "LlamaForCausalLMEagle3", "dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
}  # fmt: skip
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(.+?)(\.weight|\.bias)?\Z")
_INTEGERS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "num_hidden_layers"
)  # fmt: skip
_SELECTOR_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_SCALES = {
    "input_embedding_scale": "embedding_scale", "output_multiplier": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
_ROPE_KEYS = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")


def kind_of_file(path: Path) -> str | None:
    """What kind of drafter a GGUF file has; None if it is a model.

    Raises:
        ExportError: when it is damaged.
    """
    header = read_header(path)
    if header.architecture == _EAGLE:
        return "eagle3"
    if header.architecture != _DFLASH:
        return None
    return "dspark" if _MARKOV in header.tensors else "dflash2" if _SELECTOR in header.tensors else "dflash"


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The configuration and the tensors of a drafter, as its checkpoint has them.

    Raises:
        ExportError: when it is damaged, or computed in a way that is not known.
    """
    header, kind = read_header(path), kind_of_file(path)
    if kind is None:
        raise ExportError(f"{path} has a model of the architecture {header.architecture!r}, and no drafter.")
    config, tensors = _config(header, kind), _tensors(header, kind)
    if kind == "eagle3":
        config |= _of_eagle(header)
        if _D2T in tensors:
            tensors[_D2T] = tensors[_D2T] - np.arange(len(tensors[_D2T]))
    else:
        config |= _of_block(header, kind, tensors, config["hidden_size"])
    return config, tensors


def _config(header: GGUFHeader, kind: str) -> dict[str, Any]:
    """What all kinds have in config.json."""
    keys, rope_keys = to_gguf("keys"), to_gguf("rope_keys")
    config: dict[str, Any] = {key: header.integer(f".{keys[key]}", least=1) for key in _INTEGERS}
    whole = config["hidden_size"] // config["num_attention_heads"]
    size = header.integer(".attention.key_length", whole, least=1)
    rotated = header.integer(".rope.dimension_count", size, least=1)
    if rotated != size:
        raise _unknown(header, f"rope.dimension_count is {rotated:,}, of heads of {size:,} numbers", kind)
    if header.flag(".attention.causal", False) and kind != "eagle3":
        raise _unknown(header, "attention.causal is true", kind)
    scaling = header.text(".rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_theta": header.real(".rope.freq_base", 10_000.0)}
    if scaling != "none":
        found = {key: header.real(f".rope.scaling.{rope_keys[key]}", 0.0) for key in _ROPE_KEYS}
        rope |= {"rope_type": scaling} | {key: value for key, value in found.items() if value}
    return config | {
        "architectures": [_CLASSES[kind]],
        "head_dim": size,
        "rms_norm_eps": header.real(".attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": rope,
    }


def _of_eagle(header: GGUFHeader) -> dict[str, Any]:
    """What EAGLE-3's have besides."""
    keys = ".target_layers", ".extract_layers"
    key = next((key for key in keys if header.value(key) is not None), keys[0])
    return {
        "eagle_aux_hidden_state_layer_ids": [*map(int, header.integers(key))],
        "norm_before_residual": header.flag(".norm_before_residual", False),
        "vocab_size": header.integer(".vocab_size", 0),
        "rope_is_neox_style": False,
    }


def _of_block(header: GGUFHeader, kind: str, tensors: dict[str, NDArray[Any]], hidden: int) -> dict[str, Any]:
    """What those have besides that fill in a block."""
    of_file = "tokenizer.ggml.mask_token_id"
    mask = header.integer(of_file if of_file in header.metadata else ".mask_token_id", least=0)
    layers = header.integers(".target_layers")
    own: dict[str, Any] = {"mask_token_id": mask, "target_layer_ids": [int(i) - 1 for i in layers]}
    config: dict[str, Any] = {"block_size": header.integer(".block_size", least=2)}
    scales = {ours: header.real(f".{theirs}", 0.0) for ours, theirs in _SCALES.items()}
    if kind == "dflash2":
        own |= {name: header.integer(f".{name}", least=1) for name in _SELECTOR_KEYS} | scales
        config["vocab_size"] = len(tensors.get("candidate_selector.predecessor_codebook.weight", ()))
    elif scales["input_embedding_scale"] not in (0, 1) or scales["output_multiplier"] not in (0, 1):
        raise _unknown(header, "embedding_scale or logit_scale is not 1", kind)
    if kind == "dspark":
        if not header.flag(".sample_from_anchor", True):
            raise _unknown(header, "sample_from_anchor is false, so the newest token drafts nothing", kind)
        first, read = tensors["markov_head.markov_w1.weight"], tensors.get("confidence_head.proj.weight")
        config |= {
            "vocab_size": len(first), "markov_rank": first.shape[-1], "enable_confidence_head": read is not None,
            "confidence_head_with_markov": read is not None and read.size > hidden,
            "final_logit_softcapping": scales["final_logit_softcapping"],
        }  # fmt: skip
        if read is not None:
            tensors["confidence_head.proj.weight"] = read.reshape(1, -1)
            tensors.setdefault("confidence_head.proj.bias", np.zeros(1, np.float32))
    if window := header.integer(".attention.sliding_window", 0):
        pattern = header.value(".attention.sliding_window_pattern", True)
        count = header.integer(".block_count")
        slides = [*pattern] if isinstance(pattern, (list, memoryview)) else [bool(pattern)]
        slides *= count if len(slides) == 1 else 1
        kinds = ["sliding_attention" if each else "full_attention" for each in slides]
        config |= {"sliding_window": window, "layer_types": kinds}
    return config | {"dflash_config": own}


def _tensors(header: GGUFHeader, kind: str) -> dict[str, NDArray[Any]]:
    """The tensors by a checkpoint's names, float32 but for `d2t`, which is int64."""
    from outrider_export.sources.gguf_values import values_of

    made: dict[str, NDArray[Any]] = {}
    top, parts = from_gguf("drafter", kind), from_gguf("layer", "drafter_layer", f"{kind}_layer")
    for name, tensor in header.tensors.items():
        if name == DIVISORS:
            continue
        if name == _D2T and kind == "eagle3" and tensor.type == "I64":
            made[_D2T] = tensor.stored().view("<i8").astype(np.int64)
            continue
        layer, part, suffix = ((found := _NAME.match(name)) and found.groups()) or (None, name, None)
        known = top.get(part) if layer is None else parts.get(part)
        if known is None:
            raise _unknown(header, f"it has a tensor {name!r}", kind)
        prefix = "" if layer is None else f"layers.{layer}."
        made[f"{prefix}{known}{suffix or ''}"] = np.array(values_of(header, name))
    return made


def divisors_of(path: Path) -> NDArray[np.float32] | None:
    """By which a file's rotary frequencies are divided, float32 [n]; None if it has none."""
    header = read_header(path)
    if DIVISORS not in header.tensors:
        return None
    from outrider_export.sources.gguf_values import values_of

    return values_of(header, DIVISORS).reshape(-1)


def _unknown(header: GGUFHeader, what: str, kind: str) -> ExportError:
    return ExportError(
        f"{header.path} cannot be read as a drafter of the kind {kind}: {what}, which is not known here. Add the "
        "drafter's checkpoint in place of the GGUF file."
    )
