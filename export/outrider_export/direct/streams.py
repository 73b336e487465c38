"""Several residual streams of a token, of which each layer computes one and corrects the others: Gemma 3n's AltUp.

streams = streams_of(config)        # of a decoder that has them
streams.matrices                    # of the decoder, by their names
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist
from typing import Any

_MOST_STREAMS = 16


class StreamPart(StrEnum):
    """What streams have weights for: the parts of a layer, and those before and after all layers."""

    LAUREL_LEFT = "laurel.linear_left"
    LAUREL_RIGHT = "laurel.linear_right"
    LAUREL_NORM = "laurel.post_laurel_norm"
    ROUTER = "altup.modality_router"
    ROUTER_NORM = "altup.router_norm"
    PREDICTION = "altup.prediction_coefs"
    CORRECTION = "altup.correction_coefs"
    CORRECTED_SCALE = "altup.correct_output_scale"
    BEGIN = "model.altup_projections"  # with the number of a stream, less 1
    END = "model.altup_unembed_projections"  # the same


@dataclass(frozen=True)
class Streams:
    """count: of streams. active: which one layers compute. rank: of the matrices of a layer's Laurel part. is_scaled:
    whether what reads a layer's own embeddings is scaled first.
    """

    count: int
    active: int
    rank: int
    is_scaled: bool = True

    @property
    def matrices(self) -> list[str]:
        """The names of those that make the other streams of the first, and one of all."""
        return [f"{name}.{i}" for name in (StreamPart.BEGIN, StreamPart.END) for i in range(self.count - 1)]

    def shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """The rows and columns of matrices, by the part of a layer or the name in the decoder."""
        of_layer = {StreamPart.LAUREL_LEFT: (self.rank, hidden), StreamPart.LAUREL_RIGHT: (hidden, self.rank)}
        return of_layer | dict.fromkeys(self.matrices, (hidden, hidden))


def streams_of(config: Mapping[str, Any]) -> Streams:
    """The streams of a config.json.

    Raises:
        KeyError, TypeError, ValueError: when it says nothing, or what cannot be.
    """
    count, active, rank = (int(config[key]) for key in ("altup_num_inputs", "altup_active_idx", "laurel_rank"))
    if not (1 < count <= _MOST_STREAMS and 0 <= active < count and rank > 0):
        raise ValueError(f"altup_num_inputs={count} with altup_active_idx={active} and laurel_rank={rank}")
    return Streams(count, active, rank, bool(config.get("altup_correct_scale", True)))


def cutoffs_of(config: Mapping[str, Any], count: int) -> list[float | None]:
    """By layer, how many standard deviations above their mean numbers have to be to pass; None for all.

    Raises:
        TypeError, ValueError: when it says what cannot be.
    """
    scales = config.get("activation_sparsity_scale")  # of GGUF files
    if scales is None:
        shares = config.get("activation_sparsity_pattern", [0.95] * (10 if count > 10 else 0))
        scales = [NormalDist().inv_cdf(share) if share > 0 else None for share in shares]
        scales += [None] * (count - len(scales) if "activation_sparsity_pattern" not in config else 0)
    if len(scales) != count:
        raise ValueError(f"activation sparsity of {len(scales)} layers for {count}")
    return [None if each is None or each == float("-inf") else float(each) for each in scales]
