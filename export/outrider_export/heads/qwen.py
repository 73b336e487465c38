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


def from_qwen(config: Mapping[str, Any], tensors: Tensors, norm_offset: float = 1.0) -> tuple[dict[str, Any], Tensors]:
    """The configuration and tensors of a module as others have them. norm_offset: what the weights of norms lack.

    Raises:
        ExportError: when it has a mixture of experts, or the matrix of queries has another shape.
    """
    config = text_config(config)
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", _PARTIAL_ROTARY))
    config["rope_parameters"] = {"rope_theta": config.get("rope_theta", 10_000.0)} | rope
    if any(".mlp.experts." in name for name in tensors):
        raise ExportError("The MTP module has a mixture of experts, and only dense ones run. Leave it out: --draft none.")
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    made: Tensors = {}
    for name, values in tensors.items():
        if name.endswith(("norm.weight", "norm_embedding.weight", "norm_hidden.weight")):
            made[name] = values + np.float32(norm_offset)
        elif name.endswith(".q_proj.weight"):
            if values.ndim != 2 or len(values) != 2 * heads * size:
                raise ExportError(
                    f"The MTP module's tensor {name!r} is {[*values.shape]}, and has to have {2 * heads * size:,} rows: "
                    f"queries and gates of {heads:,} heads of {size:,}. Fetch the checkpoint again, or leave the module "
                    "out: --draft none."
                )
            both = values.reshape(heads, 2, size, -1)
            made[name] = both[:, 0].reshape(heads * size, -1)
            made[name.replace("q_proj", OUTPUT_GATE)] = both[:, 1].reshape(heads * size, -1)
        else:
            made[name] = values
    return config, made
