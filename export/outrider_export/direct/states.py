"""Layers that keep a state of a fixed size instead of keys and values, by their kind in `layer_types`.

    state = STATES["conv"](config)        # of a config.json
    state.matrices                         # its projections, which are rounded like those of attention

How each is computed is in a file of its own, by its kind: see `outrider_export.direct.graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from outrider.bundle.manifest import MOST_WIDTH


@dataclass(frozen=True)
class ShortConvolution:
    """A gated depthwise convolution over the last `kernel` tokens, as in LFM2.

    Its state is float32 [width, kernel]: what the convolution reads, of the last tokens.
    """

    width: int
    kernel: int

    kind = "short_convolution"

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The shapes of its matrices, by their names in a layer."""
        return {"conv.in_proj": (3 * self.width, self.width), "conv.out_proj": (self.width, self.width)}

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ShortConvolution:
        """What a config.json says.

        Raises:
            KeyError, ValueError: when it says nothing, or too much.
        """
        width, kernel = int(config["hidden_size"]), int(config["conv_L_cache"])
        if not (0 < width <= MOST_WIDTH and 1 < kernel <= _MOST_COLUMNS):
            raise ValueError(f"a convolution over {kernel} tokens of {width} numbers")
        return cls(width, kernel)


State: TypeAlias = ShortConvolution
STATES: dict[str, Callable[[Mapping[str, Any]], State]] = {"conv": ShortConvolution.of}
_MOST_COLUMNS = 64  # of a convolution; published models have 3 or 4
