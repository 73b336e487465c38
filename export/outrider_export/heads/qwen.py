"""MTP modules in the layout of Qwen3-Next, Qwen3.5 and their successors: one of the family's layers with attention.

    config, tensors = from_qwen(config, tensors)    # as other modules have them

They read the main model's hidden states after its final norm, and their own after theirs. After the two norms, the
embedding comes first. Queries and the gate of the attention's output are in one matrix, head by head; the weights of
norms are less by 1; a part of each head is rotated.

Source: vLLM, vllm/model_executor/models/qwen3_5_mtp.py and qwen3_next_mtp.py; llama.cpp, src/models/qwen35.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.models.backends.heads.layers import NORMALISED, NUM_ACTIVE, OUTPUT_GATE, ROUTER, SHARED_GATE
from outrider.models.backends.mixture import DOWN, GATE, UP

Tensors = dict[str, NDArray[Any]]

FAMILIES = ("qwen3_next", "qwen3_5")  # what `model_type` begins with
_LAYER = "layers.0"
_EXPERT = re.compile(r"layers\.0\.mlp\.experts\.(\d+)\.(\w+)\.weight\Z")
_PARTIAL_ROTARY = 0.25  # where config.json does not say


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the text model, where config.json is that of a model that reads images, too."""
    return {**config, **(config.get("text_config") or {})}


def is_of_family(config: Mapping[str, Any]) -> bool:
    """Whether a module's configuration is that of these families."""
    return str(text_config(config).get("model_type")).startswith(FAMILIES)


def numbers_of(config: Mapping[str, Any], tensors: Tensors) -> dict[str, float]:
    """The numbers of a module's mixture of experts; none if it is dense. config, tensors: of `from_qwen`."""
    if f"{_LAYER}.{GATE}.weight" not in tensors:
        return {}
    return {NUM_ACTIVE: int(config["num_experts_per_tok"]), NORMALISED: bool(config.get("norm_topk_prob", True))}


def _with_experts(tensors: Tensors) -> Tensors:
    """The tensors of a mixture by the names that the graph uses: of each matrix, those of all experts are one."""
    made: Tensors = {}
    apart: dict[str, dict[int, NDArray[Any]]] = {}
    for name, values in tensors.items():
        if found := _EXPERT.match(name):
            apart.setdefault(f"{_LAYER}.mlp.experts.{found[2]}.weight", {})[int(found[1])] = values
        elif name.removesuffix(".weight") == f"{_LAYER}.mlp.experts.gate_up_proj" and values.ndim > 1:
            halves = np.split(values, [values.shape[1] // 2], axis=1)
            made |= {f"{_LAYER}.{part}.weight": half for part, half in zip((GATE, UP), halves, strict=True)}
        elif name == f"{_LAYER}.{DOWN}":
            made[f"{name}.weight"] = values
        elif name == f"{_LAYER}.mlp.shared_expert_gate.weight":
            made[f"{_LAYER}.mlp.{SHARED_GATE}.weight"] = values.reshape(1, -1)  # which GGUF files have as a vector
        elif name == f"{_LAYER}.mlp.gate.weight":
            made[f"{_LAYER}.mlp.{ROUTER}.weight"] = values
        else:
            made[name.replace(".mlp.shared_expert.", ".mlp.")] = values
    for name, each in apart.items():
        shapes = {values.shape for values in each.values()}
        if len(shapes) > 1 or sorted(each) != [*range(len(each))]:
            raise ExportError(f"The MTP module's experts differ in {name}, or some are missing. Fetch the model again.")
        made[name] = np.stack([each[i] for i in range(len(each))])
    return made


def is_norm(name: str) -> bool:
    """Whether these are the weights of a norm, which are less by 1 in a checkpoint."""
    return name.endswith("norm.weight") or name.startswith("pre_fc_norm_")


def from_qwen(config: Mapping[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """The configuration and tensors of a module, by their names without "mtp.", as others have them.

    Raises:
        ExportError: when a tensor is missing or has another shape.
    """
    config = text_config(config)
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", _PARTIAL_ROTARY))
    config["rope_parameters"] = {"rope_theta": config.get("rope_theta", 10_000.0)} | rope
    has_experts = any(".mlp.experts." in name for name in tensors)
    wide = int(config["shared_expert_intermediate_size" if has_experts else "intermediate_size"])
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    expected: dict[str, tuple[int, ...]] = {}
    if has_experts:
        tensors = _with_experts(tensors)
        count, size = int(config["num_experts"]), int(config["moe_intermediate_size"])
        expected = {
            f"{_LAYER}.{GATE}": (count, size, hidden), f"{_LAYER}.{UP}": (count, size, hidden),
            f"{_LAYER}.{DOWN}": (count, hidden, size), f"{_LAYER}.mlp.{ROUTER}": (count, hidden),
            f"{_LAYER}.mlp.{SHARED_GATE}": (1, hidden),
        }  # fmt: skip
    size = int(config.get("head_dim") or hidden // heads)
    narrow = int(config.get("num_key_value_heads") or heads) * size
    layer = _LAYER
    expected |= {
        "fc": (hidden, 2 * hidden), "pre_fc_norm_embedding": (hidden,), "pre_fc_norm_hidden": (hidden,),
        "norm": (hidden,), f"{layer}.input_layernorm": (hidden,), f"{layer}.post_attention_layernorm": (hidden,),
        f"{layer}.self_attn.q_proj": (2 * heads * size, hidden), f"{layer}.self_attn.k_proj": (narrow, hidden),
        f"{layer}.self_attn.v_proj": (narrow, hidden), f"{layer}.self_attn.o_proj": (hidden, heads * size),
        f"{layer}.self_attn.q_norm": (size,), f"{layer}.self_attn.k_norm": (size,),
        f"{layer}.mlp.gate_proj": (wide, hidden), f"{layer}.mlp.up_proj": (wide, hidden),
        f"{layer}.mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    for name, shape in expected.items():
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
