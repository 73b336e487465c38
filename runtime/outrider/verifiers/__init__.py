"""Ways to choose tokens, and how much of a draft is kept in each.

`Greedy`, `Coupled`, `BlockRejection` and `TokenRejection` are lossless: with any of them, the text is the main model's
own. `Threshold` and `Typical` are lossy: they say more of what the draft model would have said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.verifiers.lossy import Threshold, Typical
from outrider.verifiers.matching import Coupled, Greedy
from outrider.verifiers.rejection import BlockRejection, TokenRejection

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.types import Verifier

# By the names that `GenerationConfig.sampling` has for them.
SAMPLING_VERIFIERS: dict[str, Callable[..., Verifier]] = {
    "coupled": Coupled,
    "rejection": BlockRejection,
    "token-rejection": TokenRejection,
    "threshold": Threshold,
    "typical": Typical,
}

__all__ = ["SAMPLING_VERIFIERS", "BlockRejection", "Coupled", "Greedy", "Threshold", "TokenRejection", "Typical"]
