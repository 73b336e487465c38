"""How the tokens that one round reads of one answer follow each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(eq=False, slots=True)
class Layout:
    """Committed tokens in a row and, after the newest one, a draft: a chain, or a tree of candidates.

        layout = Layout(num_tokens=4, num_rows=3, parents=[-1, -1])    # two candidates after two tokens
        layout.kept([1])    # [0, 1, 3]: the tokens that stay if the second candidate is accepted
        layout.branches     # [[0, 1, 2], [0, 1, 3]]

    Whoever asks names draft tokens by their indices in the draft, as `Draft` does: −1 is the newest committed token,
    and row i + 1 follows token i. The answers are indices of the chunk's tokens. num_rows: rows of logits, of the last
    tokens: in a round's call those of the newest committed token and of the draft. parents: [num_rows − 1], those of
    the draft; None: a chain.
    """

    num_tokens: int
    num_rows: int
    parents: Sequence[int] | None = None
    branches: Sequence[Sequence[int]] = field(init=False)  # its chains, each from the first token to a last

    def __post_init__(self) -> None:
        chain = (range(self.num_tokens),)
        self.branches = chain if self.parents is None else [self.kept(path) for path in branches_of(self.parents)]

    @property
    def is_tree(self) -> bool:
        """Whether there may be several candidates for a position."""
        return self.parents is not None

    def kept(self, path: Sequence[int]) -> Sequence[int]:
        """The committed tokens, and those of the draft on this path.

        Of a chain all: which of them stay depends on their number alone.
        """
        if self.parents is None:
            return range(self.num_tokens)
        num_committed = self.num_tokens - self.num_rows + 1
        return [*range(num_committed), *(num_committed + i for i in path)]


def path_to(i: int, parents: Sequence[int]) -> list[int]:
    """The indices from the first node of a tree to node i; none for −1. parents: of each node, −1 for a first one."""
    path: list[int] = []
    while i >= 0:
        path.append(i)
        i = parents[i]
    return path[::-1]


def branches_of(parents: Sequence[int]) -> list[list[int]]:
    """The paths to all nodes of a tree that nothing follows, in order."""
    inner = {*parents}
    return [path_to(i, parents) for i in range(len(parents)) if i not in inner]
