"""An index of texts that do not change: finds the end of a context in them, and the tokens that follow."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.suffix_automaton import Followers

MAX_TOKENS = 16  # longest match, in tokens
_MAX_POSITIONS = 128  # most occurrences of a match that are read
_SEPARATOR = 0  # token ids are stored plus one


class ReferenceMatch(NamedTuple):
    """The end of a context, found in the documents.

    length: its tokens. positions: int32 [n], ascending: the positions of its last token in the stored text. As that
    text runs backwards, the latest occurrence comes first.
    """

    length: int
    positions: NDArray[np.int32]


class References:
    """Documents to copy from, as token ids.

        references = References([tokenizer.encode(document) for document in documents])
        match = references.find(context)              # the longest suffix of the context that has a next token
        references.followers(match)                   # the next tokens
        match = references.extend(match, token_id)    # the match for the context plus one token

    A suffix array (Manber and Myers 1993) of the reversed documents, so that one binary search finds the longest suffix
    of a context. It is sorted by the first 16 tokens, by doubling. No match spans two documents, and none ends at a
    document's end, where no token follows.

    Source: Yang et al. 2023, "Inference with Reference" (LLMA), which copies from documents in the prompt; He et al.
    2023, "REST", which looks up the end of the context in a suffix array.
    """

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        parts = [np.zeros(1, dtype=np.int64)]
        for document in reversed(documents):
            parts += [np.asarray(document, dtype=np.int64)[::-1] + 1, parts[0]]
        self._text = np.concatenate(parts)  # int64 [n], from separator to separator
        self.num_tokens = len(self._text) - 1 - len(documents)
        self._bytes = self._text.astype(">u4").tobytes()  # big-endian: bytes compare as tokens do
        order = np.argsort(_ranks(self._text), kind="stable").astype(np.int32)
        followed = (self._text[order] != _SEPARATOR) & (self._text[order - 1] != _SEPARATOR)
        self._order = order[followed]  # int32 [n], the positions with a next token

    def find(self, context: Sequence[int]) -> ReferenceMatch | None:
        """The longest suffix of the context, up to 16 tokens, that occurs in a document with a token after it."""
        end = [token_id + 1 for token_id in reversed(context[-MAX_TOKENS:])]
        wanted = struct.pack(f">{len(end)}I", *end)
        order = memoryview(self._order)
        at = bisect_left(order, wanted, key=self._key)
        length = max((_common(wanted, self._key(order[i])) for i in (at - 1, at) if 0 <= i < len(order)), default=0)
        if not length:
            return None
        wanted = wanted[: 4 * length]
        first = bisect_left(order, wanted, hi=at, key=self._key)
        past = bisect_left(order, wanted + b"\xff" * 5, lo=at, key=self._key)
        step = -(-(past - first) // _MAX_POSITIONS)
        return ReferenceMatch(length, np.sort(self._order[first:past:step]))

    def extend(self, match: ReferenceMatch, token_id: int) -> ReferenceMatch | None:
        """The match plus one token; None if no document has that, with another token after."""
        positions = match.positions[self._text[match.positions - 1] == token_id + 1] - 1
        positions = positions[self._text[positions - 1] != _SEPARATOR]
        return ReferenceMatch(match.length + 1, positions) if len(positions) else None

    def followers(self, match: ReferenceMatch) -> Followers:
        """The next tokens of a match. Among equally frequent ones, the latest occurrence in the last document wins."""
        if len(match.positions) == 1:
            return Followers(int(self._text[match.positions[0] - 1]) - 1, 1, 1, 1)
        counts = Counter((self._text[match.positions - 1] - 1).tolist())
        ((token_id, count),) = counts.most_common(1)  # among equals, the first one
        return Followers(token_id, count, len(match.positions), len(counts))

    def _key(self, position: int) -> bytes:
        return self._bytes[4 * position : 4 * (position + MAX_TOKENS)]


def _ranks(text: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [n]: the positions' ranks by the 16 tokens that begin there."""
    rank = np.unique(text, return_inverse=True)[1]
    width = 1
    while width < MAX_TOKENS:
        ahead = np.zeros_like(rank)
        ahead[:-width] = rank[width:] + 1
        rank = np.unique(rank * (len(text) + 1) + ahead, return_inverse=True)[1]
        width *= 2
    return rank.astype(np.int64)


def _common(a: bytes, b: bytes) -> int:
    """The length of the common prefix, in whole tokens."""
    n = min(len(a), len(b)) // 4
    while a[: 4 * n] != b[: 4 * n]:
        n -= 1
    return n
