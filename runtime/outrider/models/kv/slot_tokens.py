"""The tokens whose keys and values a slot holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.types import UNKNOWN_KEY, num_common_tokens, prompt_keys


@dataclass(slots=True)
class PrefixCounts:
    """Hit statistics of the prefix cache; see `types.CacheUse`."""

    num_requests: int = 0
    num_hits: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    def add(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count one request."""
        self.num_requests += 1
        self.num_hits += num_cached_tokens > 0
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens


class Unbranched:
    """The base of slots of backends that evaluate no trees."""

    def fork(self, count: int, length: int) -> int:  # noqa: ARG002
        """0: there is no room for branches."""
        return 0

    def keep(self, path: Sequence[int]) -> None:
        """Raise: there was no tree."""
        raise AssertionError(f"a slot without room for branches is to keep {path}")


class SlotTokens(Unbranched):
    """The base of backends' slots: the tokens that were read, and how many of them are published.

    token_ids: a prompt. num_cached: how many of its tokens are in the cache from the start. counts: the statistics to
    which the request is added at its first call.
    """

    def __init__(self, token_ids: Sequence[int] = (), num_cached: int = 0, counts: PrefixCounts | None = None) -> None:
        self._token_ids = list(token_ids[:num_cached])
        self._num_published = num_cached  # closing the slot at once evicts nothing
        self._num_prompt_tokens = len(token_ids)
        self._counts = counts if token_ids else None

    @property
    def length(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return len(self._token_ids)

    @property
    def published_token_ids(self) -> list[int]:
        """The tokens that stay in the prefix cache when the slot is closed."""
        return self._token_ids[: self._num_published]

    def record(self, token_ids: Sequence[int]) -> None:
        """Record the tokens that a call writes."""
        if self._counts:  # not before: a slot that was never read into is no request
            self._counts.add(self._num_prompt_tokens, self.length)
            self._counts = None
        self._token_ids.extend(token_ids)

    def trim(self, length: int) -> None:
        """Drop the newest tokens until `length` are left. Their keys and values are overwritten next."""
        del self._token_ids[length:]
        self._num_published = min(self._num_published, length)

    def skip_to(self, length: int) -> None:
        """Pretend that the slot holds `length` tokens; see `BenchmarkSlot`."""
        self._token_ids = [UNKNOWN_KEY] * length
        self._num_published = 0

    def publish(self, token_ids: Sequence[int]) -> None:
        """Publish the slot's part of `token_ids`, which are committed."""
        self._num_published = num_common_tokens(prompt_keys(self._token_ids), token_ids)
