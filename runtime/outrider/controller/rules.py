"""Rules that end a draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq


@dataclass(frozen=True, slots=True)
class ConfidenceThreshold:
    """Goes on while the last token was drafted with at least this confidence.

    OpenVINO GenAI's `assistant_confidence_threshold`. The token that ends a draft is checked with it.
    """

    threshold: float

    def wants_more(self, confidences: Seq[float]) -> bool:
        """Whether another token is wanted."""
        return not confidences or confidences[-1] >= self.threshold
