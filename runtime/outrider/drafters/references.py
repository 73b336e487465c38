"""An index of texts that do not change: where the end of a context stands in them, and what follows there."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from outrider.drafters.suffix_automaton import Followers

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from numpy.typing import NDArray

MAX_TOKENS = 16  # of a context, so many are looked up
_MAX_PLACES = 128  # of the places where they stand, so many are looked at
_SEPARATOR = 0  # token ids are stored plus one


class Match(NamedTuple):
    """The end of a context, found in the documents.

    length: its tokens. places: int32 [n], ascending, the latest first: where the last of them stand in the stored text,
    which runs backwards.
    """

    length: int
    places: NDArray[np.int32]


class References:
    """Documents to copy from, as token ids.

        references = References([tokenizer.encode(document) for document in documents])
        match = references.find(context)              # the longest end of the context that something follows
        references.followers(match)                   # what
        match = references.extend(match, token_id)    # the same for a context that is a token longer, if it goes on so

    A suffix array (Manber and Myers 1993) of the documents read backwards, so that the longest end of a context is
    found by one binary search. It is sorted by the first 16 tokens, by doubling. No match reaches from one document
    into the next, and none ends at a document's end, where nothing follows.

    Source: Yang et al. 2023, "Inference with Reference" (LLMA), which copies from documents of the prompt; He et al.
    2023, "REST", which looks the end of the context up in a suffix array.
    """

    def __init__(self, documents: Seq[Seq[int]]) -> None:
        parts = [np.zeros(1, dtype=np.int64)]
        for document in reversed(documents):
            parts += [np.asarray(document, dtype=np.int64)[::-1] + 1, parts[0]]
        self._text = np.concatenate(parts)  # int64 [n], from separator to separator
        self.num_tokens = len(self._text) - 1 - len(documents)
        self._bytes = self._text.astype(">u4").tobytes()  # compared as bytes, they are ordered as tokens
        order = np.argsort(_ranks(self._text), kind="stable").astype(np.int32)
        followed = (self._text[order] != _SEPARATOR) & (self._text[order - 1] != _SEPARATOR)
        self._order = order[followed]  # int32 [n], the places that something follows

    def find(self, context: Seq[int]) -> Match | None:
        """The longest end of the context, of 16 tokens at most, that stands in a document with a token behind it."""
        end = [token_id + 1 for token_id in reversed(context[-MAX_TOKENS:])]
        wanted = struct.pack(f">{len(end)}I", *end)
        order = memoryview(self._order)
        at = bisect_left(order, wanted, key=self._key)
        length = max((_common(wanted, self._key(order[i])) for i in (at - 1, at) if 0 <= i < len(order)), default=0)
        if not length:
            return None
        wanted = wanted[: 4 * length]
        first = bisect_left(order, wanted, hi=at, key=self._key)
        behind = bisect_left(order, wanted + b"\xff" * 5, lo=at, key=self._key)
        step = -(-(behind - first) // _MAX_PLACES)
        return Match(length, np.sort(self._order[first:behind:step]))

    def extend(self, match: Match, token_id: int) -> Match | None:
        """The match one token on; None where no document goes on so, with another token behind."""
        places = match.places[self._text[match.places - 1] == token_id + 1] - 1
        places = places[self._text[places - 1] != _SEPARATOR]
        return Match(match.length + 1, places) if len(places) else None

    def followers(self, match: Match) -> Followers:
        """What follows where a match stands; "latest" is what stands in the last document, there furthest behind."""
        if len(match.places) == 1:
            return Followers(int(self._text[match.places[0] - 1]) - 1, 1, 1, 1)
        counts = Counter((self._text[match.places - 1] - 1).tolist())
        ((token_id, count),) = counts.most_common(1)  # of equals, the one that was met first
        return Followers(token_id, count, len(match.places), len(counts))

    def _key(self, place: int) -> bytes:
        return self._bytes[4 * place : 4 * (place + MAX_TOKENS)]


def _ranks(text: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [n]: the places' ranks by the 16 tokens that begin there."""
    rank = np.unique(text, return_inverse=True)[1]
    width = 1
    while width < MAX_TOKENS:
        ahead = np.zeros_like(rank)
        ahead[:-width] = rank[width:] + 1
        rank = np.unique(rank * (len(text) + 1) + ahead, return_inverse=True)[1]
        width *= 2
    return rank.astype(np.int64)


def _common(a: bytes, b: bytes) -> int:
    """How many whole tokens both begin with."""
    n = min(len(a), len(b)) // 4
    while a[: 4 * n] != b[: 4 * n]:
        n -= 1
    return n
