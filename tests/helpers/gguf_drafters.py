"""Drafters that read hidden states, in GGUF files as llama.cpp's converter writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from heads import DECODER, HEAD_SIZE, TOKEN_MAP, config_of, tensors_of
from outrider_export.sources.gguf_names import to_gguf
from tiny import finish_gguf

Change = Callable[[gguf.GGUFWriter], Any]


def swap_halves(values: Any, size: int = HEAD_SIZE) -> Any:
    """Rows of queries or keys for rotating neighbours, from those for rotating halves."""
    return values.reshape(-1, 2, size // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def write_drafter(path: Path, kind: str, change: Change = lambda _: None, leave_out: str = "") -> Path:
    """A drafter in a GGUF file. change: of the writer, before it writes; leave_out: a key."""
    config, form = config_of(kind), kind.split()[0]
    own = {**config, **(config.get("dflash_config") or {})}
    is_eagle = form == "eagle3"
    writer = gguf.GGUFWriter(path, "eagle3" if is_eagle else "dflash")
    keys: dict[str, int] = {
        "block_count": config["num_hidden_layers"], "embedding_length": 64, "context_length": 512,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": HEAD_SIZE,
        "rope.dimension_count": HEAD_SIZE, "vocab_size": 448,
    }  # fmt: skip
    if not is_eagle:
        keys["block_size"] = own["block_size"]
        writer.add_mask_token_id(own["mask_token_id"])
    selector = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    keys |= {name: own[name] for name in selector if name in own}
    for name, value in keys.items():
        if name != leave_out:
            writer.add_uint32(f"{writer.arch}.{name}", value)
    scales = {"embedding_scale": "input_embedding_scale", "logit_scale": "output_multiplier"}
    for theirs, ours in (scales | {"final_logit_softcapping": "final_logit_softcapping"}).items():
        if ours in own:
            writer.add_float32(f"{writer.arch}.{theirs}", own[ours])
    layers = own["eagle_aux_hidden_state_layer_ids"] if is_eagle else [i + 1 for i in own["target_layer_ids"]]
    if leave_out != "target_layers":
        writer.add_array(f"{writer.arch}.target_layers", layers)
    writer.add_layer_norm_rms_eps(DECODER["rms_norm_eps"])
    writer.add_rope_freq_base(10_000.0)
    if "sliding_window" in own:
        writer.add_sliding_window(own["sliding_window"])
        slides = [each == "sliding_attention" for each in own["layer_types"]]
        writer.add_array(f"{writer.arch}.attention.sliding_window_pattern", slides)
    top, parts = to_gguf("drafter", form), to_gguf("layer", "drafter_layer", f"{form}_layer")
    for name, values in tensors_of(kind).items():
        if name in ("t2d", "embed_tokens.weight", "lm_head.weight") and not (is_eagle and name == "lm_head.weight"):
            continue  # of DSpark they are the main model's
        if name == "d2t":
            writer.add_tensor("d2t", TOKEN_MAP.astype(np.int64), raw_dtype=gguf.GGMLQuantizationType.I64)
            continue
        if is_eagle and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = swap_halves(values)
        stem, suffix = name.replace("midlayer.", "layers.0."), ""
        if stem.endswith((".weight", ".bias")):
            stem, _, kind_of_values = stem.rpartition(".")
            suffix = f".{kind_of_values}"
        if stem.startswith("layers."):
            _, layer, part = stem.split(".", 2)
            full = f"blk.{layer}.{parts[part]}{suffix}"
        else:
            full = f"{top[stem]}{suffix or '.weight'}"
        writer.add_tensor(full, np.ascontiguousarray(values))
    change(writer)
    finish_gguf(writer)
    return path
