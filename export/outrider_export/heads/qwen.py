"""MTP modules in the layout of Qwen3-Next, Qwen3.5 and their successors: one of the family's layers with attention.

    config, tensors = from_qwen(config, tensors)    # as other modules have them

They read the main model's hidden states behind its final norm, and their own behind theirs. Behind the two norms, the
embedding comes first. Queries and the gate of the attention's output are in one matrix, head by head; the weights of
norms are less by 1; a part of each head is rotated.

Source: vLLM, vllm/model_executor/models/qwen3_5_mtp.py and qwen3_next_mtp.py; llama.cpp, src/models/qwen35.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.models.backends.heads.layers import OUTPUT_GATE

Tensors = dict[str, NDArray[Any]]

FAMILIES = ("qwen3_next", "qwen3_5")  # what `model_type` begins with
_PARTIAL_ROTARY = 0.25  # where config.json does not say


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the text model, where config.json is that of a model that reads images, too."""
    return {**config, **(config.get("text_config") or {})}


def is_of_family(config: Mapping[str, Any]) -> bool:
    """Whether a module's configuration is that of these families."""
    return str(text_config(config).get("model_type")).startswith(FAMILIES)


def is_norm(name: str) -> bool:
    """Whether these are the weights of a norm, which are less by 1 in a checkpoint."""
    return name.endswith("norm.weight") or name.startswith("pre_fc_norm_")


def from_qwen(config: Mapping[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """The configuration and tensors of a module, by their names without "mtp.", as others have them.

    Raises:
        ExportError: when a tensor is missing or has another shape, or there is a mixture of experts.
    """
    config = text_config(config)
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", _PARTIAL_ROTARY))
    config["rope_parameters"] = {"rope_theta": config.get("rope_theta", 10_000.0)} | rope
    if any(".mlp.experts." in name for name in tensors):
        raise ExportError("The MTP module has a mixture of experts, which cannot be a drafter. Choose a dense model.")
    heads, hidden, wide = (int(config[each]) for each in ("num_attention_heads", "hidden_size", "intermediate_size"))
    size = int(config.get("head_dim") or hidden // heads)
    narrow = int(config.get("num_key_value_heads") or heads) * size
    layer = "layers.0"
    for name, shape in {
        "fc": (hidden, 2 * hidden), "pre_fc_norm_embedding": (hidden,), "pre_fc_norm_hidden": (hidden,),
        "norm": (hidden,), f"{layer}.input_layernorm": (hidden,), f"{layer}.post_attention_layernorm": (hidden,),
        f"{layer}.self_attn.q_proj": (2 * heads * size, hidden), f"{layer}.self_attn.k_proj": (narrow, hidden),
        f"{layer}.self_attn.v_proj": (narrow, hidden), f"{layer}.self_attn.o_proj": (hidden, heads * size),
        f"{layer}.self_attn.q_norm": (size,), f"{layer}.self_attn.k_norm": (size,),
        f"{layer}.mlp.gate_proj": (wide, hidden), f"{layer}.mlp.up_proj": (wide, hidden),
        f"{layer}.mlp.down_proj": (hidden, wide),
    }.items():  # fmt: skip
        found = tensors.get(f"{name}.weight")
        if found is None or found.shape != shape or found.dtype != np.float32:
            has = "missing" if found is None else f"{found.dtype} {[*found.shape]}"
            raise ExportError(
                f"The MTP module's tensor '{name}.weight' is {has}, and has to be of floats {[*shape]} by the model's "
                "configuration. Fetch the model again, or leave the module out: --draft none."
            )
    made = {name: values + np.float32(1) if is_norm(name) else values for name, values in tensors.items()}
    queries = f"{layer}.self_attn.q_proj.weight"
    both = made[queries].reshape(heads, 2, size, hidden)
    made[queries], gates = (both[:, i].reshape(heads * size, hidden) for i in range(2))
    return config, made | {queries.replace("q_proj", OUTPUT_GATE): gates}
