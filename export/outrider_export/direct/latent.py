"""Latent attention (MLA), as DeepSeek V2 and later have it: keys and values are made of a short row of each token.

    latent = latent_of(config)               # of a config.json; its sizes
    latent.parts                             # the matrices of a layer's attention
    rows_in_checkpoint("self_attn.k_b_proj", latent, num_heads)   # "self_attn.kv_b_proj", and which of its rows

The cache holds whole keys and values: OpenVINO's paged attention has no other. Of each head, the rotated numbers come
first here, as two halves; files have them last, as neighbours.

Source: DeepSeek-AI 2024, "DeepSeek-V2", equations 9 to 19; Transformers 5.5, modeling_deepseek_v3.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Q_A, Q_B, Q, OUT = (f"self_attn.{name}_proj" for name in ("q_a", "q_b", "q", "o"))
KV_A, KV_B = "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"
K_B, V_B = "self_attn.k_b_proj", "self_attn.v_b_proj"  # the rows of KV_B that make keys, and values
Q_NORM, KV_NORM = "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"
QUERIES = (Q_A, Q_NORM, Q_B)  # of which one or two make queries
EPS = 1e-6  # of these two norms, whatever the configuration says


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention.

    query_rank: numbers that queries are made of; 0 for those of the residual stream. rank: that keys and values are
    made of. plain, rotated: of a head's query or key, without and with a rotation; the latter is of all heads.
    value_size: of a head's value.
    """

    query_rank: int
    rank: int
    plain: int
    rotated: int
    value_size: int

    @property
    def head_size(self) -> int:
        """Numbers of a head's query or key."""
        return self.rotated + self.plain

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the matrices of a layer's attention."""
        return (*((Q_A, Q_B) if self.query_rank else (Q,)), KV_A, K_B, V_B, OUT)

    def shapes(self, hidden_size: int, num_heads: int) -> dict[str, tuple[int, int]]:
        """The rows and columns of these matrices, and of that which has keys and values, as files have them."""
        queries, values = num_heads * self.head_size, num_heads * self.value_size
        return {
            Q: (queries, hidden_size), Q_A: (self.query_rank, hidden_size), Q_B: (queries, self.query_rank),
            KV_A: (self.rank + self.rotated, hidden_size), KV_B: (num_heads * self.plain + values, self.rank),
            OUT: (hidden_size, values),
        }  # fmt: skip


def latent_of(config: Mapping[str, Any]) -> Latent:
    """The sizes that a config.json gives.

    Raises:
        KeyError, ValueError: when one is missing, or cannot be.
    """
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    rank, plain, rotated, value_size = (int(config[name]) for name in names)
    found = Latent(int(config.get("q_lora_rank", 0)), rank, plain, rotated, value_size)
    if min(rank, plain, rotated, value_size) < 1 or rotated % 2 or found.query_rank < 0:
        raise ValueError(f"latent attention of {', '.join(f'{name}={config[name]}' for name in names)}")
    if config.get("rope_interleave") is False:
        raise ValueError("rope_interleave=False")
    return found


def scale_of(latent: Latent, config: Mapping[str, Any]) -> float:
    """What products of queries and keys are multiplied by.

    Where waves are stretched, DeepSeek's own code and llama.cpp have a further factor; Transformers has it for V2 from
    5.15 on (its pull request 47435).
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    weight = rope.get("mscale_all_dim") or 0
    grown = 1.0
    if weight and rope.get("rope_type", rope.get("type", "default")) != "default" and rope["factor"] > 1:
        grown = 0.1 * float(weight) * math.log(rope["factor"]) + 1
    return float(latent.head_size**-0.5 * grown * grown)


def dense_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have no experts, by `mlp_layer_types`; {} where that is missing."""
    for key, plain in (
        ("moe_layer_freq", (1,)),
        ("moe_layer_interval", (1,)),
        ("moe_layer_end_index", (-1, int(config["num_hidden_layers"]) - 1)),
    ):
        if config.get(key, plain[0]) not in plain:
            raise ValueError(f"{key}={config[key]}")
    kinds = config.get("mlp_layer_types")
    if not kinds:
        return {}
    if len(kinds) != int(config["num_hidden_layers"]) or {*kinds} - {"dense", "sparse"}:
        raise ValueError(f"mlp_layer_types={kinds}")
    return {"num_dense_layers": 0, "mlp_only_layers": [i for i, kind in enumerate(kinds) if kind == "dense"]}


def rows_in_checkpoint(part: str, latent: Latent, num_heads: int) -> tuple[str, NDArray[np.int64] | None]:
    """The module that holds a part of a layer's attention, and which of its rows, in the order here; None for all."""
    turned = np.arange(latent.rotated).reshape(-1, 2).T.reshape(-1)  # neighbours to halves
    if part in (Q, Q_B):
        of_head = np.concatenate([latent.plain + turned, np.arange(latent.plain)])
        return part, _of_heads(of_head, latent.head_size, num_heads)
    if part == KV_A:
        return part, np.concatenate([np.arange(latent.rank), latent.rank + turned])
    if part in (K_B, V_B):
        size = latent.plain + latent.value_size
        of_head = np.arange(latent.plain) if part == K_B else np.arange(latent.plain, size)
        return KV_B, _of_heads(of_head, size, num_heads)
    return part, None


def _of_heads(of_head: NDArray[np.int64], size: int, num_heads: int) -> NDArray[np.int64]:
    """The rows of each head that are at these places in it, for heads of `size` rows."""
    rows: NDArray[np.int64] = (np.arange(num_heads)[:, None] * size + of_head).reshape(-1)
    return rows
