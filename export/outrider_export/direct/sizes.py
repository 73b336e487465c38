"""Sizes of a decoder's layers, which the layers of Gemma 3n and 4 do not have in common.

Gemma 4's layers with full attention have larger heads than those with a sliding window. Of the last layers of both,
none has keys and values: they read those of the last layer of their kind that has.

Source: Transformers 5.5, models/gemma3n/modeling_gemma3n.py and models/gemma4/modeling_gemma4.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider_export.direct.latent import Latent

FULL = "full_attention"


@dataclass(frozen=True)
class LayerSizes:
    """Of a layer: heads of keys and values, numbers in a head, and numbers between its dense products.

    keys_of: the earlier layer whose keys and values it reads; None if it has its own. values_are_keys: one product
    makes both. latent: what keys and values are made of, where a short row of each token makes them.
    """

    num_kv_heads: int
    head_size: int
    mlp_size: int
    keys_of: int | None = None
    values_are_keys: bool = False
    latent: Latent | None = None

    @property
    def value_size(self) -> int:
        """Numbers in a head of values."""
        return self.head_size if self.latent is None else self.latent.value_size


def varied_sizes(config: Mapping[str, Any], sizes: LayerSizes) -> list[LayerSizes]:
    """The sizes of layers. sizes: of those with a sliding window.

    Raises:
        KeyError, TypeError, ValueError: when the configuration says nothing, or what cannot be.
    """
    kinds: Sequence[str] = config["layer_types"]
    first_shared = len(kinds) - int(config.get("num_kv_shared_layers", 0))
    if not 0 <= first_shared <= len(kinds):
        raise ValueError(f"num_kv_shared_layers={config['num_kv_shared_layers']!r}")
    widths = config.get("intermediate_sizes", [sizes.mlp_size] * len(kinds))
    if len(widths) != len(kinds):
        raise ValueError(f"intermediate_size of {len(widths)} layers for {len(kinds)}")
    found = []
    for i, kind in enumerate(kinds):
        each = replace(sizes, mlp_size=int(widths[i]))
        if kind == FULL:
            same = bool(config.get("attention_k_eq_v"))
            heads = int(config["num_global_key_value_heads"]) if same else sizes.num_kv_heads
            size = int(config.get("global_head_dim") or sizes.head_size)
            each = replace(each, num_kv_heads=heads, head_size=size, values_are_keys=same)
        if 0 < first_shared <= i:
            before = [j for j in range(first_shared) if kinds[j] == kind]
            if not before:
                raise ValueError(f"no layer of the kind {kind!r} with keys and values of its own")
            wide = each.mlp_size * (2 if config.get("use_double_wide_mlp") else 1)
            each = replace(each, keys_of=before[-1], mlp_size=wide)
        found.append(each)
    return found
