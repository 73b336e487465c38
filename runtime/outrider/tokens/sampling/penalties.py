"""Logit bias and penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np

from outrider.config import GenerationConfig
from outrider.types import Logits


class LogitBias:
    """Adds a number to the logits of some tokens, as `logit_bias` of OpenAI's API."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._token_ids = _ids(biases)
        self._biases = np.fromiter(biases.values(), dtype=np.float32, count=len(biases))

    def commit(self, token_ids: Seq[int]) -> None:
        """Nothing to remember."""

    def apply(self, logits: Logits, prefix: Seq[int]) -> None:  # noqa: ARG002
        """Change the logits in place."""
        logits[self._token_ids] += self._biases


class Penalties:
    """Repetition, presence and frequency penalties of one sequence.

    Repetition (Keskar et al. 2019, CTRL; Transformers): a positive logit of a token in prompt or answer is divided by
    the penalty, a negative one multiplied. Presence and frequency (OpenAI's API): with c the token's count in the
    answer, its logit loses `presence_penalty * (c > 0) + frequency_penalty * c`.
    """

    def __init__(self, config: GenerationConfig, prompt_token_ids: Seq[int]) -> None:
        self._repetition = np.float32(config.repetition_penalty)
        self._presence = config.presence_penalty
        self._frequency = config.frequency_penalty
        self._seen = set(prompt_token_ids) if config.repetition_penalty != 1 else set()
        self._counts: Counter[int] = Counter()

    @property
    def active(self) -> bool:
        """Whether any penalty is set."""
        return bool(self._repetition != 1 or self._presence or self._frequency)

    def commit(self, token_ids: Seq[int]) -> None:
        """Count tokens of the answer."""
        if self._repetition != 1:
            self._seen.update(token_ids)
        self._counts.update(token_ids)

    def apply(self, logits: Logits, prefix: Seq[int]) -> None:
        """Change the logits in place. `prefix` follows the committed tokens."""
        if self._repetition != 1:
            seen = _ids(self._seen.union(prefix))
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._presence or self._frequency:
            counts = self._counts + Counter(prefix)
            penalties = [self._presence + self._frequency * count for count in counts.values()]
            logits[_ids(counts)] -= np.asarray(penalties, dtype=np.float32)


def _ids(token_ids: set[int] | Mapping[int, float]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
