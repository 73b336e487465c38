"""Which tokens' keys and values a slot holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.kv.block_pool import num_common_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

_UNKNOWN = -1  # no token's id: what is in the cache there is nobody's


@dataclass(slots=True)
class PrefixCounts:
    """How often texts were begun whose beginning was in the cache, and how much of it. See `types.CacheUse`."""

    num_requests: int = 0
    num_hits: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    def add(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count one text."""
        self.num_requests += 1
        self.num_hits += num_cached_tokens > 0
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens


class SlotTokens:
    """What a backend's slots have in common: the tokens that were read, and how many of them are to be kept.

    token_ids: those of a prompt. num_cached: how many of them are in the cache from the start. counts: where the text
    is counted when it is read on.
    """

    def __init__(self, token_ids: Seq[int] = (), num_cached: int = 0, counts: PrefixCounts | None = None) -> None:
        self._token_ids = list(token_ids[:num_cached])
        self._num_published = num_cached  # a slot that is closed at once loses nothing
        self._num_prompt_tokens = len(token_ids)
        self._counts = counts if token_ids else None

    @property
    def length(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return len(self._token_ids)

    @property
    def published_token_ids(self) -> list[int]:
        """Those that stay when the slot is closed."""
        return self._token_ids[: self._num_published]

    def append(self, token_ids: Seq[int]) -> None:
        """Take down what a call writes."""
        if self._counts:  # not before: a place that was opened in vain is no request
            self._counts.add(self._num_prompt_tokens, self.length)
            self._counts = None
        self._token_ids.extend(token_ids)

    def trim(self, length: int) -> None:
        """Drop the newest tokens until `length` are left. What they wrote is overwritten next."""
        del self._token_ids[length:]
        self._num_published = min(self._num_published, length)

    def skip_to(self, length: int) -> None:
        """Take `length` tokens to be in the cache, whatever is there: for measurements of what a call costs."""
        self._token_ids = [_UNKNOWN] * length
        self._num_published = 0

    def publish(self, token_ids: Seq[int]) -> None:
        """Of `token_ids`, all committed, keep for others what is in the cache."""
        self._num_published = num_common_tokens(self._token_ids, token_ids)
