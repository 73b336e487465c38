"""What the prefix cache knows a position's keys and values by.

A `CacheKey` is one of these integers, so that texts are compared and hashed as lists of integers:

- the token's id, of a token that was read as part of a prompt;
- ~id, which is negative, of an answer's token where answers have other keys and values than prompts
  (`Capabilities.marks_answers`);
- 2^32 and more, of a position where embeddings are read: a hash of their key, and the place among them. Its complement,
  in an answer.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outrider.types.prompt import Span

CacheKey: TypeAlias = int

UNKNOWN_KEY: CacheKey = -(1 << 62)  # of unknown tokens; no other key is the same
_STRETCH = 64  # tokens that are compared at once


def embed_keys(keys: Sequence[CacheKey], embeds: Sequence[Span], begin: int = 0) -> list[CacheKey]:
    """The keys of positions from `begin` on, with those of embeddings where such are read."""
    made = [*keys]
    for span in embeds:
        first, end = max(begin, span.begin), min(begin + len(made), span.begin + len(span.embeds))
        if first < end:
            digest = hashlib.sha256(repr((len(span.embeds), span.key)).encode()).digest()
            of_span = int.from_bytes(digest, "big") << 32
            for i in range(first, end):
                key = of_span + i - span.begin
                made[i - begin] = key if made[i - begin] >= 0 else ~key
    return made


def answer_keys(keys: Iterable[CacheKey]) -> list[CacheKey]:
    """The keys of an answer's tokens, from those that they would have in a prompt."""
    return [~key for key in keys]


def prompt_keys(keys: Iterable[CacheKey]) -> list[CacheKey]:
    """The keys that the same tokens have in a prompt: their ids, but for embeddings."""
    return [key if key >= 0 else ~key for key in keys]


def num_common_tokens(some: Sequence[int], others: Sequence[int]) -> int:
    """The length of two texts' common prefix."""
    length, begin = min(len(some), len(others)), 0
    while begin < length and some[begin : begin + _STRETCH] == others[begin : begin + _STRETCH]:
        begin += _STRETCH
    end = min(begin + _STRETCH, length)
    return next((i for i in range(begin, end) if some[i] != others[i]), end)
