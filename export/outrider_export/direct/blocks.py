"""Checkpoints that number attention, states and feed-forward parts each on their own, as Nemotron-H does.

    kinds = block_kinds(config)            # ["mamba", "mlp", "mamba", "attention", "mlp"]
    blocks = Blocks.of(kinds)              # three layers, the second of which has no feed-forward part

Here, a layer is what mixes tokens (attention, or a state) with the feed-forward part after it, if there is one.

Source: Transformers 5.5 and 5.17, configuration_nemotron_h.py; patterns as NVIDIA publishes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
