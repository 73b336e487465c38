"""Tensors of DSpark's and DFlash 2's checkpoints, as the graph and `outrider.drafters.markov` read them.

Source: github.com/deepseek-ai/DeepSpec, deepspec/modeling/dspark: `markov_head.py`, `qwen3` and `gemma4`; vLLM,
vllm/model_executor/models/qwen3_dflash2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.markov import SCALE, TOP_K
from outrider.errors import ExportError
from outrider.models.backends.features import BLOCK_STATES
from outrider.models.backends.heads.block import INPUT_SCALE
from outrider.models.backends.heads.layers import AFTER_ATTENTION, AFTER_FEED_FORWARD, GELU

Tensors = dict[str, NDArray[Any]]

_HEADS = ("markov_head.", "confidence_head.")
BEFORE, AFTER = "markov.before", "markov.after"  # W1 and W2
_SELECTOR = "candidate_selector."
_CODEBOOKS = {"predecessor_codebook": BEFORE, "successor_codebook": AFTER}
_COPIES = ("embed_tokens.weight", "lm_head.weight")  # of the main model's
# What f reads besides W1's row, by markov_head_type: its tensor's name, its outputs and its own state, in ranks.
_JOINTS = {"vanilla": None, "gated": ("gate_proj", 1, 0), "rnn": ("joint_proj", 3, 1)}
GEMMA_NORMS = {
    "post_attention_layernorm": AFTER_ATTENTION,
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": AFTER_FEED_FORWARD,
}


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with what LiquidAI's and SpecForge's have one level deeper, and what they mean without saying.

    Source: github.com/sgl-project/SpecForge, specforge/modeling/draft/dspark.py, and its training of a block's labels.
    """
    own = config.get("dflash_config") or {}
    return {
        "confidence_head_with_markov": "Lfm2DSparkDraftModel" in config.get("architectures", ()),
        "enable_confidence_head": bool(own.get("confidence_head_alpha")),
        **own,
        **config,
    }


def split_heads(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """The tensors with the Markov head and the confidence head apart: what reads a block's hidden states, and the rest.

    Raises:
        ExportError: when a tensor is missing or has another shape.
    """
    hidden, rank, vocab = (int(config[name]) for name in ("hidden_size", "markov_rank", "vocab_size"))
    kind = str(config.get("markov_head_type", "vanilla")).lower()
    if kind not in _JOINTS:
        raise ExportError(f"config.json has markov_head_type {kind!r}, and known are {', '.join(_JOINTS)}.")

    def get(name: str, *shape: int) -> NDArray[np.float32]:
        return floats(tensors, name, *shape)

    of_block = [(np.zeros((0, hidden), np.float32), np.zeros(0, np.float32))]
    made = {name: each for name, each in tensors.items() if name not in _COPIES and not name.startswith(_HEADS)}
    if rank:
        made[BEFORE], made[AFTER] = (get(f"markov_head.markov_w{i}.weight", vocab, rank) for i in (1, 2))
        if (joint := _JOINTS[kind]) is not None:
            name, outputs, states = joint
            weight = get(f"markov_head.{name}.weight", outputs * rank, (states + 1) * rank + hidden)
            bias = get(f"markov_head.{name}.bias", outputs * rank)
            # Hidden states come first in a gate, and last in a recurrent head.
            first, second = np.split(weight, [2 * rank if states else hidden], axis=1)
            made["markov.joint"] = np.ascontiguousarray(first if states else second)
            of_block.append((second if states else first, bias))
    if config.get("enable_confidence_head"):
        read = rank if config.get("confidence_head_with_markov") else 0
        weight, bias = get("confidence_head.proj.weight", 1, hidden + read), get("confidence_head.proj.bias", 1)
        own = np.zeros((1, max(rank, 1)), np.float32)
        own[:, :read] = weight[:, hidden:]
        made["markov.confidence"] = own
        of_block.append((weight[:, :hidden], bias))
    if len(of_block) > 1:
        weights, biases = zip(*of_block, strict=True)
        made[f"{BLOCK_STATES}.weight"], made[f"{BLOCK_STATES}.bias"] = np.concatenate(weights), np.concatenate(biases)
    return made


def split_selector(config: Mapping[str, Any], tensors: Tensors) -> tuple[Tensors, dict[str, float]]:
    """The tensors of DFlash 2 with its selector apart, and the numbers that say what it does.

    config: with what is in `dflash_config`.

    Raises:
        ExportError: when a tensor is missing or has another shape, or a number is not possible.
    """
    hidden, vocab, rank, top_k, taps, group = (
        int(config[name])
        for name in (
            "hidden_size", "vocab_size", "selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"
        )
    )  # fmt: skip
    if min(rank, top_k, taps, group) < 1 or hidden % group:
        raise ExportError(
            f"config.json has selector_rank {rank}, selector_top_k {top_k}, conv_kernel_size {taps} and "
            f"conv_group_size {group}: they have to be at least 1, and the last has to divide hidden_size {hidden:,}. "
            "Fetch it again."
        )
    if config.get("is_causal"):
        raise ExportError("config.json has is_causal true, and only blocks whose tokens all see each other are known.")
    made = {name: each for name, each in tensors.items() if name not in _COPIES and not name.startswith(_SELECTOR)}
    for name, ours in _CODEBOOKS.items():
        full = next((each for each in (f"{_SELECTOR}{name}", f"{_SELECTOR}{name}.weight") if each in tensors), name)
        made[ours] = floats(tensors, full, vocab, rank)
    made[f"{BLOCK_STATES}.weight"] = floats(tensors, f"{_SELECTOR}hidden_projection.weight", rank, hidden)
    for i in range(int(config["num_hidden_layers"])):
        for part in ("attention_conv", "mlp_conv"):
            floats(tensors, f"layers.{i}.{part}.base_kernel", 2, taps, hidden)
            floats(tensors, f"layers.{i}.{part}.kernel_projection.weight", 2 * taps * (hidden // group), hidden)
    return made, {
        TOP_K: top_k,
        SCALE: float(config.get("output_multiplier") or 1.0),
        INPUT_SCALE: float(config.get("input_embedding_scale") or 1.0),
    }


def floats(tensors: Tensors, name: str, *shape: int) -> NDArray[np.float32]:
    """A tensor of floats of this shape."""
    found = tensors.get(name)
    if found is None or found.shape != shape or found.dtype != np.float32:
        has = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
        raise ExportError(
            f"The drafter's tensor {name!r} is {has}, and has to be of floats {list(shape)}. Fetch it again."
        )
    return found


def from_gemma(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors, dict[str, float]]:
    """The configuration and tensors of Gemma 4's layers by the names of Qwen3's, and further numbers.

    Its keys may be its values, too; values have a norm without weights; and attention is not scaled, which is the same
    as queries whose norm is √head_size times as large.
    """
    size, is_shared = int(config["global_head_dim"]), bool(config.get("attention_k_eq_v"))
    made: Tensors = {}
    for name, values in tensors.items():
        layer, _, rest = name.rpartition(".")[0].rpartition(".")
        if rest in GEMMA_NORMS:
            name = f"{layer}.{GEMMA_NORMS[rest]}.weight"
        if rest == "q_norm":
            values = values * np.float32(size**0.5)
        if rest == "k_proj":
            made[f"{layer}.v_norm.weight"] = np.ones(size, np.float32)
            if is_shared:
                made[f"{layer}.v_proj.{name.rpartition('.')[2]}"] = values
        made[name] = values
    config = config | {"head_dim": size, "rope_parameters": (config.get("rope_parameters") or {}).get("full_attention")}
    if is_shared:
        config["num_key_value_heads"] = config["num_global_key_value_heads"]
    return config, made, {GELU: 1.0}


def cut(tensors: Mapping[str, NDArray[np.float32]], vocab_size: int, token_ids: NDArray[np.int32] | None) -> Tensors:
    """W1 and W2 for these tokens, or for all. W1 then has one row more, for the tokens that are not among them.

    Raises:
        ExportError: when they have fewer rows than the main model has tokens.
    """
    if BEFORE not in tensors:
        return {}
    before, after = tensors[BEFORE], tensors[AFTER]
    if len(before) < vocab_size:
        raise ExportError(
            f"The drafter's Markov head has {len(before):,} tokens, and the main model has {vocab_size:,}. Name the "
            "main model that it was trained for."
        )
    if token_ids is None:
        return {BEFORE: before[:vocab_size], AFTER: after[:vocab_size]}
    others = np.delete(before[:vocab_size], token_ids, axis=0)
    row = others.mean(0, keepdims=True) if len(others) else before[:1]
    return {BEFORE: np.concatenate([before[token_ids], row]), AFTER: after[token_ids]}
