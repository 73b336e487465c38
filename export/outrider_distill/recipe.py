"""What determines the training data."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_ANSWER = 4  # tokens
USUAL_PROMPT, USUAL_ANSWER = 128, 200
_USER_SHARE = 0.5  # of the prompts
_SHARDS, _LEAST_SIZE, _MOST_SIZE = 8, 64, 512  # conversations of a shard


@dataclass(frozen=True)
class Recipe:
    """What determines the data, besides the prompts and the main model.

    num_tokens: of answers, at least; the last shard is written whole. taps: whether it has the hidden states that heads
    read. user_share: of the prompts, as long as there are some of the user's.
    """

    num_tokens: int
    taps: bool = False
    seed: int = 0
    max_new_tokens: int = 256
    user_share: float = _USER_SHARE

    @property
    def shard_size(self) -> int:
        """Conversations of a shard: small amounts are divided, too."""
        return min(_MOST_SIZE, max(_LEAST_SIZE, self.num_tokens // (_SHARDS * USUAL_ANSWER)))
