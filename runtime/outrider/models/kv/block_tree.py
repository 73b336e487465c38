"""The tree of published blocks: which texts are in the prefix cache."""

from __future__ import annotations

import bisect

from outrider.types import num_common_tokens

_MOST_NEAR = 64  # blocks with common prefixes that are searched for a row


class Block:
    """A published block with `token_ids`, which follow those of its ancestors."""

    __slots__ = ("_order", "children", "num_users", "number", "parent", "rows", "token_ids")

    def __init__(self, number: int, token_ids: tuple[int, ...], parent: Block | None) -> None:
        self.number = number
        self.token_ids = token_ids
        self.parent = parent
        self.children: dict[tuple[int, ...], Block] = {}
        self._order: list[tuple[int, ...]] = []  # the children's keys, sorted: common prefixes are neighbours
        self.num_users = 0
        self.rows: dict[int, int] = {}  # of states, by how many of these tokens they have

    def add(self, number: int, token_ids: tuple[int, ...]) -> Block:
        """Add a child."""
        made = self.children[token_ids] = Block(number, token_ids, self)
        bisect.insort(self._order, token_ids)
        return made

    def remove(self, child: Block) -> None:
        """Remove a child."""
        del self.children[child.token_ids]
        del self._order[bisect.bisect_left(self._order, child.token_ids)]

    def nearest(self, token_ids: tuple[int, ...]) -> tuple[Block | None, int]:
        """The child with the longest common prefix with `token_ids`, and the prefix's length."""
        at = bisect.bisect_left(self._order, token_ids)
        most, key = max(
            ((num_common_tokens(k, token_ids), k) for k in self._order[max(at - 1, 0) : at + 1]), default=(0, ())
        )
        return (self.children[key], most) if most else (None, 0)

    def nearest_row(self, token_ids: tuple[int, ...]) -> tuple[Block | None, int]:
        """The child with the row of the longest prefix of `token_ids`, and that prefix's length."""
        found, best = None, 0
        at = bisect.bisect_left(self._order, token_ids)
        for keys in (self._order[at : at + _MOST_NEAR], self._order[max(at - _MOST_NEAR, 0) : at][::-1]):
            for key in keys:  # their common prefixes become shorter
                num_common = num_common_tokens(key, token_ids)
                if num_common <= best:
                    break
                child = self.children[key]
                offset = max((each for each in [*child.rows] if each <= num_common), default=0)
                if offset > best:
                    found, best = child, offset
        return found, best


class Root(Block):
    """The root of a scope's tree."""

    __slots__ = ("scope",)

    def __init__(self, scope: bytes) -> None:
        super().__init__(-1, (), None)
        self.scope = scope
