"""Sizes of a decoder's layers where they differ, and the numbers of their parts in a checkpoint.

Gemma 4's layers with full attention have larger heads than those with a sliding window. Of the last layers of Gemma 3n
and 4, none has keys and values: they read those of the last layer of their kind that has. Nemotron-H numbers attention,
states and feed-forward parts each on their own:

    kinds = block_kinds(config)            # ["mamba", "mlp", "mamba", "attention", "mlp"]
    blocks = Blocks.of(kinds)              # three layers, the second of which has no feed-forward part

Here, a layer is what mixes tokens (attention, or a state) with the feed-forward part after it, if there is one.

Source: Transformers 5.5 and 5.17, models/gemma3n/modeling_gemma3n.py, models/gemma4/modeling_gemma4.py and
configuration_nemotron_h.py; patterns as NVIDIA publishes them.
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


MLP, MOE = "mlp", "moe"
_KINDS = {"M": "mamba", "*": "attention", "-": MLP, "E": MOE}  # in a pattern
_RENAMED = {"linear_attention": "mamba"}  # by later Transformers
_FEEDING = (MLP, MOE)


@dataclass(frozen=True)
class Blocks:
    """The numbers in a checkpoint of each layer's parts. feeding: of its feed-forward part; None for none."""

    mixing: tuple[int, ...]
    feeding: tuple[int | None, ...]

    @classmethod
    def of(cls, kinds: Sequence[str]) -> Blocks:
        """Of the kinds of a checkpoint's blocks.

        Raises:
            ValueError: for a feed-forward part that follows no block that mixes tokens.
        """
        mixing: list[int] = []
        feeding: list[int | None] = []
        for number, kind in enumerate(kinds):
            if kind not in _FEEDING:
                mixing.append(number)
                feeding.append(None)
            elif mixing and mixing[-1] == number - 1:
                feeding[-1] = number
            else:
                raise ValueError(f"block {number} of the kind {kind!r} after none that mixes tokens")
        return cls(tuple(mixing), tuple(feeding))

    def number(self, layer: int, *, feeds: bool) -> int | None:
        """The number in a checkpoint of a layer's feed-forward part, or of what mixes tokens; None if it has none."""
        return (self.feeding if feeds else self.mixing)[layer]

    def layer(self, number: int) -> int | None:
        """The layer that a block of a checkpoint is in; None for a number that is too large."""
        return next((i for i, pair in enumerate(zip(self.mixing, self.feeding, strict=True)) if number in pair), None)


def block_kinds(config: Mapping[str, Any]) -> list[str]:
    """The kinds of the blocks that a config.json lists; [] if it lists none."""
    kinds, pattern = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    if isinstance(kinds, list):
        return [_RENAMED.get(str(kind), str(kind)) for kind in kinds]
    return [_KINDS.get(kind, kind) for kind in pattern] if isinstance(pattern, str) else []
