"""The tokens that calls are measured with."""

from __future__ import annotations

import numpy as np

from outrider.types import Backend


def random_tokens(backend: Backend, count: int) -> list[int]:
    """Tokens of a model's vocabulary, the same at every call, and as the beginning of more of them.

    They differ from one another, because a mixture of experts reads the weights of all experts that any token of a call
    activates. Equal tokens activate the same ones, so that a call of several would seem to cost what one token does.
    """
    token_ids: list[int] = np.random.default_rng(0).integers(backend.vocab_size, size=count).tolist()
    return token_ids
