"""Tensors of Gemma 4's assistants, as `outrider.models.backends.heads.assistant` reads them.

Source: Transformers 5.6, models/gemma4_assistant: `configuration_gemma4_assistant.py` and
`modeling_gemma4_assistant.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.manifest import Geometry
from outrider.errors import ExportError
from outrider.models.backends.heads.assistant import CACHE, CENTROIDS, CLUSTERED, KV_HEADS, NUM_CLUSTERS, ORDER, WINDOW
from outrider.models.backends.heads.layers import GELU
from outrider_export.direct.rope import rope_of
from outrider_export.direct.sizes import FULL
from outrider_export.heads.dspark import GEMMA_NORMS, Tensors, floats

if TYPE_CHECKING:
    from outrider_export.heads.formats import HeadCheckpoint


_SLIDING = "sliding_attention"
_PREFIX = re.compile(r"^model\.")
_LAYER = re.compile(r"^(layers\.\d+)\.(.+)\.weight$")
_TABLE, _ORDERING = "embed_tokens.weight", "masked_embedding.token_ordering"
# What would be computed in another way, with the only value that is known.
_KNOWN: dict[str, tuple[Any, ...]] = {
    "hidden_size_per_layer_input": (0, None),
    "enable_moe_block": (False, None),
    "use_double_wide_mlp": (False, None),
    "attention_bias": (False, None),
    "hidden_activation": ("gelu_pytorch_tanh",),
}


def read(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """What `HeadCheckpoint` says of an assistant.

    Raises:
        ExportError: when a tensor is missing or has another shape, or something is computed in a way that is not known.
    """
    text = _text_of(config)
    made, numbers = _read_tensors(config, text, tensors)
    return {
        "tensors": made,
        "numbers": numbers,
        "num_layers": int(text["num_hidden_layers"]),
        "num_heads": int(text["num_attention_heads"]),
        "num_kv_heads": int(text["num_key_value_heads"]),
        "head_size": int(text["head_dim"]),
        "hidden_size": int(config["backbone_hidden_size"]),
        "context_length": int(text["max_position_embeddings"]),
    }


def caches_of(head: HeadCheckpoint, main: Geometry) -> dict[str, float]:
    """Which of the main model's layers with a cache each layer reads: the last of its kind.

    Raises:
        ExportError: when the main model has no such keys and values.
    """
    windows = main.sliding_windows
    shapes = main.kv_shapes or ((main.num_kv_heads, main.head_size),) * main.num_attention_layers
    found: dict[str, float] = {}
    for layer in [f"layers.{i}" for i in range(head.num_layers)]:
        is_full = f"{layer}.{WINDOW}" not in head.numbers
        own = [i for i, shape in enumerate(shapes) if all(shape) and windows and (not windows[i]) == is_full]
        wanted = int(head.numbers[f"{layer}.{KV_HEADS}"]), len(head.tensors[f"{layer}.self_attn.q_norm.weight"])
        if not own or shapes[own[-1]] != wanted or main.layer_states:
            has = "{} of {}".format(*shapes[own[-1]]) if own else "none"
            where = "full" if is_full else "in a sliding window"
            raise ExportError(
                f"The assistant reads {wanted[0]} heads of keys of {wanted[1]} numbers where attention is {where}, and "
                f"this main model has {has} there. Name the Gemma 4 that it was trained for."
            )
        found[f"{layer}.{CACHE}"] = sum(map(all, shapes[: own[-1]]))
    return found


def _text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of its layers."""
    text = {"hidden_activation": "gelu_pytorch_tanh", **config["text_config"]}
    for name, known in _KNOWN.items():
        if text.get(name) not in known:
            raise ExportError(
                f"config.json has {name} {text[name]!r}, and assistants with {known[0]!r} are known. Take one of those."
            )
    kinds, count = text["layer_types"], int(text["num_hidden_layers"])
    if len(kinds) != count or not {*kinds} <= {FULL, _SLIDING}:
        raise ExportError(
            f"config.json has layer_types {kinds!r}, and an assistant of {count} layers has so many, each {FULL!r} or "
            f"{_SLIDING!r}. Fetch it again."
        )
    if int(text.get("num_kv_shared_layers") or count) != count:
        raise ExportError(
            f"config.json has num_kv_shared_layers {text['num_kv_shared_layers']}, and all {count} layers of an "
            "assistant read the main model's keys and values. Fetch it again."
        )
    return text


def _read_tensors(
    config: Mapping[str, Any], text: Mapping[str, Any], tensors: Tensors
) -> tuple[Tensors, dict[str, float]]:
    """The tensors and numbers of its graph."""
    kinds: Sequence[str] = text["layer_types"]
    tensors = {_PREFIX.sub("", name): values for name, values in tensors.items()}
    hidden, wide, heads = (int(text[name]) for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    backbone, vocab = int(config["backbone_hidden_size"]), int(text["vocab_size"])
    made: Tensors = {
        "pre_projection.weight": floats(tensors, "pre_projection.weight", hidden, 2 * backbone),
        "post_projection.weight": floats(tensors, "post_projection.weight", backbone, hidden),
        "norm.weight": floats(tensors, "norm.weight", hidden),
    }
    numbers = {"rms_norm_eps": float(text.get("rms_norm_eps", 1e-6)), "num_layers": len(kinds), GELU: 1.0}
    for kind in dict.fromkeys(kinds):
        rope = rope_of(text["rope_parameters"][kind], _head_size(text, kind), int(text["max_position_embeddings"]))
        name = f"rotary.{'full' if kind == FULL else 'sliding'}"
        made[f"{name}.frequencies"], numbers[f"{name}.scale"] = rope.frequencies[None], rope.scale
    for i, kind in enumerate(kinds):
        layer, size = f"layers.{i}", _head_size(text, kind)
        numbers |= _numbers_of(layer, kind, text)
        shapes = {
            "self_attn.q_proj": (heads * size, hidden), "self_attn.q_norm": (size,),
            "self_attn.o_proj": (hidden, heads * size), "input_layernorm": (hidden,),
            "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide),
        } | dict.fromkeys(GEMMA_NORMS, (hidden,))  # fmt: skip
        for part, shape in shapes.items():
            found = floats(tensors, f"{layer}.{part}.weight", *shape)
            made[f"{layer}.{GEMMA_NORMS.get(part, part)}.weight"] = found
        if f"{layer}.layer_scalar" in tensors:
            made[f"{layer}.layer_scalar"] = floats(tensors, f"{layer}.layer_scalar", 1)
    name = "lm_head.weight" if "lm_head.weight" in tensors else _TABLE
    matrix = floats(tensors, name, vocab, hidden)
    if not config.get("use_ordered_embeddings"):
        return made | {"lm_head.weight": matrix}, numbers
    return made | _clusters(config, tensors, matrix), numbers | {
        NUM_CLUSTERS: float(config["centroid_intermediate_top_k"])
    }


def _head_size(text: Mapping[str, Any], kind: str) -> int:
    return int((kind == FULL and text.get("global_head_dim")) or text["head_dim"])


def _numbers_of(layer: str, kind: str, text: Mapping[str, Any]) -> dict[str, float]:
    """The heads of keys that a layer reads, and its window."""
    is_full = kind == FULL
    heads = text["num_global_key_value_heads" if is_full and text.get("attention_k_eq_v") else "num_key_value_heads"]
    if int(text["num_attention_heads"]) % int(heads):
        raise ExportError(
            f"config.json has {text['num_attention_heads']} heads of queries for {heads} heads of keys, which have to "
            "divide them. Fetch it again."
        )
    window = {} if is_full else {f"{layer}.{WINDOW}": float(text["sliding_window"])}
    return {f"{layer}.{KV_HEADS}": float(heads), **window}


def _clusters(config: Mapping[str, Any], tensors: Tensors, matrix: NDArray[np.float32]) -> Tensors:
    """The output matrix by clusters, whose rows are put one after the other, and their centroids."""
    vocab, hidden = matrix.shape
    count, active = int(config["num_centroids"]), int(config["centroid_intermediate_top_k"])
    if not 0 < active <= count or vocab % count:
        raise ExportError(
            f"config.json has {count:,} centroids of which {active:,} are chosen, for {vocab:,} tokens: they have to "
            "be as many at least, and clusters of one size. Fetch it again."
        )
    order = tensors.get(_ORDERING)
    if order is None or not np.array_equal(np.sort(order.ravel()), np.arange(vocab)):
        raise ExportError(
            f"The drafter's tensor {_ORDERING!r} is {'missing' if order is None else 'damaged'}, and has to list each "
            f"of {vocab:,} tokens once. Fetch it again."
        )
    token_ids = order.ravel().astype(np.int32)
    return {
        f"{CENTROIDS}.weight": floats(tensors, "masked_embedding.centroids.weight", count, hidden),
        f"{CLUSTERED}.weight": matrix[token_ids],
        ORDER: token_ids,
    }
