"""Frequencies of rotary position embeddings.

Source: Su et al. 2021, "RoFormer"; the variants as Transformers computes them (modeling_rope_utils.py): linear, llama3,
YaRN (Peng et al. 2023) and LongRoPE (Ding et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Frequencies = NDArray[np.float32]


@dataclass(frozen=True)
class Rope:
    """How queries and keys are rotated.

    frequencies: float32 [n], radians a position; the first 2n numbers of each head are rotated. scale: of sines and
    cosines. long: the frequencies of long texts; None if they are no others. axes: along which axis of its position
    each frequency rotates, int [n]; None if positions have one.
    """

    frequencies: Frequencies
    scale: float = 1.0
    long: Frequencies | None = None
    axes: tuple[int, ...] | None = None


def rope_of(parameters: Mapping[str, Any], head_size: int, context: int) -> Rope:
    """The rotation that `rope_parameters` of a configuration describes. context: max_position_embeddings.

    Raises:
        KeyError: for a parameter that is missing.
        ValueError: for an unknown `rope_type`, or more numbers than a head has.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = "default" if kind == "mrope" else kind  # of texts: see `axes_of`
    if kind not in (*_KINDS, "proportional") or (kind == "dynamic" and not parameters.get("alpha")):
        raise ValueError(f"RoPE of the kind {kind!r}")
    share = parameters.get("partial_rotary_factor") or 1.0
    if not 0 < share <= 1:
        raise ValueError(f"RoPE of {share:g} of a head")
    if kind == "proportional":
        return _proportional(parameters, head_size)
    width = int(head_size * share)
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    plain: Frequencies = (1.0 / np.float32(parameters["rope_theta"]) ** exponents).astype(np.float32)
    return _KINDS[kind](plain, {"max_position_embeddings": context, **parameters})


def axes_of(parameters: Mapping[str, Any], count: int, *, interleaved: bool) -> tuple[int, ...]:
    """The axis of each of `count` frequencies where tokens of images have positions along three (M-RoPE).

    interleaved: whether the axes take turns, as in Qwen3-VL; otherwise each has a section.

    Source: Transformers 5.5, `apply_multimodal_rotary_pos_emb` (Qwen2-VL) and `apply_interleaved_mrope` (Qwen3-VL).
    """
    sections = [int(each) for each in parameters["mrope_section"]]
    if interleaved:
        return tuple(j % 3 if j % 3 and j < 3 * sections[j % 3] else 0 for j in range(count))
    if sum(sections) != count:
        raise ValueError(f"sections of RoPE {sections} for {count} frequencies")
    return tuple(axis for axis, length in enumerate(sections) for _ in range(length))


def _proportional(parameters: Mapping[str, Any], head_size: int) -> Rope:
    """As Gemma 4: the first waves are those of the whole head, and the other numbers of the head are not rotated."""
    count = int((parameters.get("partial_rotary_factor") or 1.0) * head_size // 2)
    made = np.zeros(head_size // 2, dtype=np.float32)
    made[:count] = np.float32(parameters["rope_theta"]) ** (-2 * np.arange(count, dtype=np.float32) / head_size)
    return Rope(made / np.float32(parameters.get("factor") or 1.0))


def _dynamic(plain: Frequencies, parameters: Mapping[str, Any]) -> Rope:
    """As Hunyuan: a larger base from the first position on. Without `alpha`, it grows with the text: see `rope_of`."""
    size = 2 * len(plain)
    return Rope((plain * np.float32(parameters["alpha"]) ** (-np.arange(0, size, 2) / (size - 2))).astype(np.float32))


def _llama3(plain: Frequencies, parameters: Mapping[str, Any]) -> Rope:
    """Long waves are stretched by `factor`, short ones are not, those between are mixed."""
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = parameters["original_max_position_embeddings"] * plain / (2 * math.pi)  # within the original context
    share = np.clip((turns - low) / ((high - low) or 1e-9), 0, 1)
    return Rope(((1 - share) * plain / factor + share * plain).astype(np.float32))


def _yarn(plain: Frequencies, parameters: Mapping[str, Any]) -> Rope:
    """YaRN, equations 19 to 23: stretched or not by the number of turns within the original context."""
    base, original = parameters["rope_theta"], parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or parameters["max_position_embeddings"] / original

    def index_of(turns: float) -> float:
        return len(plain) * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    low, high = index_of(parameters.get("beta_fast") or 32), index_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(plain) - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low or 0.001), 0, 1)
    scale = parameters.get("attention_factor")
    if scale is None:
        first, second = parameters.get("mscale"), parameters.get("mscale_all_dim")
        both = bool(first and second)
        scale = _magnitude(factor, first if both else 1) / (_magnitude(factor, second) if both else 1)
    return Rope((plain / factor * ramp + plain * (1 - ramp)).astype(np.float32), float(scale))


def _magnitude(factor: float, weight: Any) -> float:
    return 0.1 * float(weight) * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(plain: Frequencies, parameters: Mapping[str, Any]) -> Rope:
    """LongRoPE: a set of factors up to the original context, and another one for longer texts."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or parameters["max_position_embeddings"] / original
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short: Frequencies = np.array(parameters["short_factor"], dtype=np.float32)
    if "long_factor" not in parameters:
        return Rope(plain / short, float(scale))
    long: Frequencies = np.array(parameters["long_factor"], dtype=np.float32)
    return Rope(plain / short, float(scale), plain / long)


_KINDS: dict[str, Callable[[Frequencies, Mapping[str, Any]], Rope]] = {
    "default": lambda plain, _: Rope(plain),
    "dynamic": _dynamic,
    "linear": lambda plain, parameters: Rope(plain / np.float32(parameters["factor"])),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def halves_order(num_heads: int, head_size: int, rotary_size: int) -> NDArray[np.int64]:
    """The rows of queries or keys that are stored for rotating neighbours, in the order for rotating halves.

    Of each head's first `rotary_size` rows, the even ones come first.
    """
    of_head = np.arange(head_size)
    of_head[:rotary_size] = of_head[:rotary_size].reshape(-1, 2).T.reshape(-1)
    order: NDArray[np.int64] = (np.arange(num_heads)[:, None] * head_size + of_head).reshape(-1)
    return order
