"""Layers that keep a state of a fixed size instead of keys and values, by their kind in `layer_types`.

    state = STATES["conv"](config)        # of a config.json
    state.matrices                         # its projections, which are rounded like those of attention

How each is computed is in a file of its own, by its kind: see `outrider_export.direct.graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.bundle.fields import MOST_WIDTH


@dataclass(frozen=True)
class ShortConvolution:
    """A gated depthwise convolution over the last `kernel` tokens, as in LFM2.

    Its state is float32 [width, kernel]: what the convolution reads, of the last tokens.
    """

    width: int
    kernel: int

    kind = "short_convolution"
    reading_alike = ()
    others = ("conv.conv.weight", "conv.conv.bias")  # tensors besides its projections

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


@dataclass(frozen=True)
class GatedDeltaNet:
    """A gated delta net after a convolution over the last `kernel` tokens, as in Qwen3.5 and Qwen3-Next.

    Its states are float32 [conv_width, kernel] and [num_heads, key_size, head_size]. num_key_heads: of queries and of
    keys, each for as many heads of values.
    """

    width: int
    num_key_heads: int
    key_size: int
    num_heads: int
    head_size: int
    kernel: int

    kind = "gated_delta_net"
    reading_alike = tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a"))  # matrices that do
    others = tuple(
        f"linear_attn.{name}" for name in ("conv1d.weight", "conv1d.bias", "A_log", "dt_bias", "norm.weight")
    )

    @property
    def key_width(self) -> int:
        """Numbers of all queries of a token, and of all keys."""
        return self.num_key_heads * self.key_size

    @property
    def value_width(self) -> int:
        """Numbers of all values of a token."""
        return self.num_heads * self.head_size

    @property
    def conv_width(self) -> int:
        """Numbers of a token that the convolution reads: its queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The shapes of its matrices, by their names in a layer."""
        return {
            "linear_attn.in_proj_qkv": (self.conv_width, self.width),
            "linear_attn.in_proj_z": (self.value_width, self.width),
            "linear_attn.in_proj_b": (self.num_heads, self.width),
            "linear_attn.in_proj_a": (self.num_heads, self.width),
            "linear_attn.out_proj": (self.width, self.value_width),
        }

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GatedDeltaNet:
        """What a config.json says.

        Raises:
            KeyError, ValueError: when it says nothing, or too much.
        """
        names = "num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim"
        found = cls(int(config["hidden_size"]), *(int(config[f"linear_{name}"]) for name in names))
        _check_sizes("a gated delta net", found.conv_width, found.kernel, found.num_heads, found.num_key_heads)
        return found


@dataclass(frozen=True)
class SelectiveSSM:
    """Mamba-2 after a convolution over the last `kernel` tokens, as in Granite 4.0-H and Nemotron-H.

    Its states are float32 [conv_width, kernel] and [num_heads, head_size, state_size]. num_groups: of B and C, each for
    as many heads. limits: of time steps. norm_groups: parts of the output that are normed each on its own.
    """

    width: int
    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    kernel: int
    limits: tuple[float, float]
    norm_groups: int = 1

    kind = "selective_ssm"
    reading_alike = ()
    others = tuple(f"mamba.{name}" for name in ("conv1d.weight", "conv1d.bias", "A_log", "dt_bias", "D", "norm.weight"))

    @property
    def inner_width(self) -> int:
        """Numbers of all heads of a token."""
        return self.num_heads * self.head_size

    @property
    def group_width(self) -> int:
        """Numbers of a token's B, and of its C."""
        return self.num_groups * self.state_size

    @property
    def conv_width(self) -> int:
        """Numbers of a token that the convolution reads: its heads, B and C."""
        return self.inner_width + 2 * self.group_width

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The shapes of its matrices, by their names in a layer."""
        rows = self.inner_width + self.conv_width + self.num_heads
        return {"mamba.in_proj": (rows, self.width), "mamba.out_proj": (self.width, self.inner_width)}

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> SelectiveSSM:
        """What a config.json says.

        Raises:
            KeyError, ValueError: when it says nothing, or too much.
        """
        width, heads = int(config["hidden_size"]), int(config["mamba_n_heads"])
        size = config.get("mamba_d_head", "auto")
        size = int(config["mamba_expand"]) * width // heads if size == "auto" else int(size)
        groups, wide, kernel = (int(config[f"mamba_{name}"]) for name in ("n_groups", "d_state", "d_conv"))
        least, most = config.get("time_step_limit") or (0.0, float("inf"))
        parts = groups if config.get("mamba_norm_by_group") else 1
        found = cls(width, heads, size, groups, wide, kernel, (_float(least), _float(most)), parts)
        _check_sizes("Mamba-2", found.conv_width, found.kernel, found.num_heads, found.num_groups)
        return found


def _float(value: Any) -> float:
    """A number of a config.json: Transformers 5 writes infinity as {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _check_sizes(what: str, width: int, kernel: int, num_heads: int, num_groups: int) -> None:
    if not (0 < width <= MOST_WIDTH and 1 < kernel <= _MOST_COLUMNS):
        raise ValueError(f"{what} with a convolution over {kernel} tokens of {width} numbers")
    if num_groups <= 0 or num_heads % num_groups:
        raise ValueError(f"{what} with {num_heads} heads in {num_groups} groups")


State: TypeAlias = ShortConvolution | GatedDeltaNet | SelectiveSSM
STATES: dict[str, Callable[[Mapping[str, Any]], State]] = {
    "conv": ShortConvolution.of,
    "linear_attention": GatedDeltaNet.of,
    "mamba": SelectiveSSM.of,
}
_MOST_COLUMNS = 64  # of a convolution; published models have 3 or 4


def rows_in_fused(part: str, state: GatedDeltaNet) -> tuple[str, int, NDArray[np.int64]] | None:
    """The matrix that holds a projection, how many rows it has, and which of them; None if there is no such matrix.

    Qwen3-Next's checkpoints have two projections of a gated delta net in one matrix, by heads of keys:

        module, count, rows = rows_in_fused("linear_attn.in_proj_z", state)     # those of "linear_attn.in_proj_qkvz"

    Source: Transformers 5.5, modeling_qwen3_next.py, `fix_query_key_value_ordering`.
    """
    each = state.num_heads // state.num_key_heads
    values = each * state.head_size
    sizes: tuple[int, ...]
    wanted: tuple[int, ...]
    if part in ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"):
        name, sizes = "linear_attn.in_proj_qkvz", (state.key_size, state.key_size, values, values)
        wanted = (0, 1, 2) if part.endswith("qkv") else (3,)
    elif part in ("linear_attn.in_proj_b", "linear_attn.in_proj_a"):
        name, sizes, wanted = "linear_attn.in_proj_ba", (each, each), (0,) if part.endswith("b") else (1,)
    else:
        return None
    total = state.num_key_heads * sum(sizes)
    by_head = np.arange(total).reshape(state.num_key_heads, -1)
    begins = np.cumsum((0, *sizes))
    rows = [by_head[:, begins[i] : begins[i + 1]].reshape(-1) for i in wanted]
    return name, total, np.concatenate(rows)
