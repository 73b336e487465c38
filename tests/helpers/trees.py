"""Random trees of draft tokens, and a drafter that proposes them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.types import Draft, Drafter


def random_tree(rng: np.random.Generator, most: int = 7, vocab_size: int = 39) -> Draft:
    """A tree whose siblings differ, sometimes a chain."""
    parents: list[int] = []
    token_ids: list[int] = []
    for i in range(int(rng.integers(1, most + 1))):
        parent = int(rng.integers(-1, i))
        siblings = [token_ids[j] for j in range(i) if parents[j] == parent]
        token_ids.append(int(rng.choice([n for n in range(vocab_size) if n not in siblings])))
        parents.append(parent)
    return Draft(token_ids, parents=parents)


@dataclass
class Trees(Drafter):
    """Proposes random trees. Every other one has the plain text's next tokens on one of its branches."""

    text: list[int]
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    num_assistant_tokens: int = 8
    shapes: set[int] = field(default_factory=set)

    def propose(self, requests: Any) -> list[Draft]:
        drafts = []
        for request in requests:
            draft = random_tree(self.rng, request.limit)
            if self.rng.random() < 0.7:
                leaf = draft.branches[int(self.rng.integers(len(draft.branches)))]
                done = len(request.sequence)
                token_ids = [*draft.token_ids]
                for depth, i in enumerate(leaf):
                    if done + depth < len(self.text):
                        token_ids[i] = self.text[done + depth]
                draft = Draft(token_ids, parents=draft.parents)
            self.shapes.add(len(draft.branches))
            drafts.append(draft)
        return drafts
