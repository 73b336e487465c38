"""All processors of one sequence, in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outrider.errors import DeviceError
from outrider.sampling.penalties import Penalties
from outrider.sampling.truncate import truncated_softmax

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.config import GenerationConfig
    from outrider.types import Distribution, Logits


class LogitsSampler:
    """Turns logits float32 [vocab_size] of one sequence into a token or a distribution.

    Raises:
        DeviceError: when a row holds no finite maximum, which only broken weights or a broken driver produce.
    """

    def __init__(self, config: GenerationConfig, prompt_token_ids: Seq[int]) -> None:
        self._config = config
        self._penalties = Penalties(config, prompt_token_ids)

    def best(self, logits: Logits, prefix: Seq[int]) -> int:
        """The token with the highest processed logit; the lowest id among equals."""
        if self._penalties.active:
            logits = self._penalties.apply(logits, prefix)
        return _finite_argmax(logits)

    def distribution(self, logits: Logits, prefix: Seq[int]) -> Distribution:
        """The probabilities after all processors."""
        if self._penalties.active:
            logits = self._penalties.apply(logits, prefix)
        config = self._config
        _finite_argmax(logits)
        return truncated_softmax(logits, config.temperature, config.top_k, config.top_p, config.min_p)

    def commit(self, token_ids: Seq[int]) -> None:
        """Take tokens into the state that penalties look at."""
        if self._penalties.active:
            self._penalties.commit(token_ids)


def _finite_argmax(logits: Logits) -> int:
    token_id = int(logits.argmax())  # the first NaN, if there is one
    if not np.isfinite(logits[token_id]):
        raise DeviceError(
            f"The model's logits are not finite ({logits[token_id]} for token {token_id}). Check the bundle with "
            "'outrider inspect --check', or calculate in precision='f32'."
        )
    return token_id
