"""Addresses as clients write them, whose base URL has a version twice or not at all, or a slash too many."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_VERSIONED = "chat/completions|completions|embeddings|messages|models|rerank|responses"  # what /v1 has
_DOUBLED = re.compile(
    r"(?:/v1)+(?=/v1/|/v1$|/api/)|/api(?=/v1/(?:chat/completions|completions|embeddings|messages|responses)$)"
)
_ALIKE = 0.75  # similarity, of at most 1, from which on another address may be meant
_BARE = re.compile(rf"/(?:{_VERSIONED})(?:/|$)")


def canonical(path: str) -> str:
    """The address that a path stands for: /v1/models for /models, //v1/models/ and /v1/v1/models."""
    made = re.sub("//+", "/", path)
    if not made.startswith("/page/"):
        made = made.rstrip("/") or "/"
    made = _DOUBLED.sub("", made, count=1) if _DOUBLED.match(made) else made
    return f"/v1{made}" if _BARE.match(made) else made


def nearest_address(path: str, known: Iterable[str]) -> str:
    """A question whether another address is meant; empty if none is like it."""
    close = difflib.get_close_matches(path[:200], known, n=1, cutoff=_ALIKE)
    return f" Did you mean {close[0]}?" if close else ""
