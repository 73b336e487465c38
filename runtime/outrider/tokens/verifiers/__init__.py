"""Verifiers: ways to choose tokens, and to accept or reject draft tokens.

`Greedy`, `Coupled`, `BlockRejection` and `TokenRejection` are lossless: the text has the main model's distribution.
`Threshold` and `Typical` are lossy: they accept more, and the text is partly the draft model's.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.tokens.verifiers.lossy import Threshold, Typical
from outrider.tokens.verifiers.matching import Coupled, Greedy
from outrider.tokens.verifiers.rejection import BlockRejection, TokenRejection
from outrider.types import Verifier

# By their names in `GenerationConfig.sampling`.
SAMPLING_VERIFIERS: dict[str, Callable[..., Verifier]] = {
    "coupled": Coupled,
    "rejection": BlockRejection,
    "token-rejection": TokenRejection,
    "threshold": Threshold,
    "typical": Typical,
}

__all__ = ["SAMPLING_VERIFIERS", "BlockRejection", "Coupled", "Greedy", "Threshold", "TokenRejection", "Typical"]
