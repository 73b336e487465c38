"""What a file of states is worth to the prefix store: the reading that it saves, by its bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

_MAX_WORTH = 0.99
Children = Mapping[str, Mapping[str, tuple[int, ...]]]  # tokens of files, by the parent and the key


def key_of(text: bytes) -> str:
    """The key of what a text names: a file, or the parent of some."""
    return hashlib.sha256(text).hexdigest()[:40]


def states_of(parent: str) -> str:
    """What the states after tokens of the chunks after `parent` have as their parent."""
    return key_of(f"states {parent}".encode())


def state_worths(children: Children, parents: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, float]:
    """The worth of each file of states by the byte, by its key: as a multiple of that of keys and values.

    States save reading the tokens after the nearest states before them, as the keys and values of these tokens would.
    They are of no use without those, so they are worth no more, and go first. A text's last states are the most likely
    to be needed: those that others follow are worth half.

    parents: of each key. sizes: bytes of each key's file.
    """
    parents_of_states = {states_of(parent): parent for parent in children}
    found: dict[str, float] = {}
    followed: set[str] = set()
    num_tokens = num_bytes = 0
    for key, parent in parents.items():
        token_ids = children[parent][key]
        if (of := parents_of_states.get(parent)) is not None:
            num_saved, before = _saved(children, parents, of, token_ids)
            found[key] = num_saved / max(sizes.get(key, 0), 1)
            followed.add(before)
        elif key in sizes:
            num_tokens, num_bytes = num_tokens + len(token_ids), num_bytes + sizes[key]
    bytes_per_token = num_bytes / max(num_tokens, 1)
    return {key: min(each * bytes_per_token, _MAX_WORTH) / (1 + (key in followed)) for key, each in found.items()}


def _saved(children: Children, parents: Mapping[str, str], parent: str, token_ids: tuple[int, ...]) -> tuple[int, str]:
    """The tokens after the nearest states before those of `token_ids`, which follow `parent`, and their key, or ""."""
    count, most = 0, len(token_ids) - 1
    while True:
        states = children.get(states_of(parent), {}).items()
        before = [(len(each), key) for key, each in states if len(each) <= most and each == token_ids[: len(each)]]
        if before:
            length, key = max(before)
            return count + len(token_ids) - length, key
        count += len(token_ids)
        grandparent = parents.get(parent)
        if grandparent is None:
            return count, ""
        parent, token_ids = grandparent, children[grandparent][parent]
        most = len(token_ids)
