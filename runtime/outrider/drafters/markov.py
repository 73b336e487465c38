"""The correction of a block's logits by the tokens chosen before, as DSpark has it.

One call gives the logits of all places, as if each token did not depend on the others. Then, token by token,

    logits of place i + W2 · f(W1[token before])

W2 has a row for each token, so only those of a place's likeliest tokens are read. The others get probability 0 in
draft_probs, so every mode stays lossless.

DFlash 2 chooses among the `top_k` likeliest tokens of each place in the same way, with f(W1[token before]) = W1[token
before] · a projection of the place's hidden states, number by number.

Source: DeepSeek 2026, DSpark (github.com/deepseek-ai/DeepSpec): semi-autoregressive drafts with a Markov head. vLLM,
vllm/model_executor/models/qwen3_dflash2.py: DFlash 2's selector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.types import ListedLogits, Logits, LogitsRow

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from outrider.drafters.vocabulary import Subset
    from outrider.models.backends.heads.weights import Table

    Numbers = NDArray[np.float32]

SCALE, TOP_K = "markov.scale", "markov.top_k"
NUM_CANDIDATES = 256  # 64 lose nothing when drafts are greedy; see docs/drafters.md
_GROUPS = 16  # of logits, for each candidate


@dataclass(frozen=True)
class MarkovHead:
    """The weights of a correction, and of the chance that a token is accepted.

        correction = MarkovHead.read(path, None, vocab_size).correction(block_states)
        row, chance = correction.next(row, token_before)

    before, after: W1 and W2, [tokens, rank]; None without a correction. With a `subset`, they have the rows of its
    tokens, and W1 one more, for all others. joint: float32, what f reads of W1's row and of its own state: None if f is
    the identity (vanilla), [rank, rank] if it is a gate, [3 · rank, 2 · rank] if it is recurrent (rnn); what f reads of
    hidden states is in `block_states`. confidence: float32 [rank], of the logit of a token's chance; None if the head
    says none. scale: of logits. soft_cap: of scaled logits, 0 for none. top_k: of a selector as DFlash 2 has it, whose
    newest token is read and drafts nothing; 0 for other heads.
    """

    vocab_size: int
    before: Table | None = None
    after: Table | None = None
    joint: Numbers | None = None
    confidence: Numbers | None = None
    soft_cap: float = 0.0
    subset: Subset | None = None
    scale: float = 1.0
    top_k: int = 0

    @classmethod
    def read(cls, path: Path, subset: Subset | None, vocab_size: int) -> MarkovHead:
        """The head in a drafter's file."""
        from outrider.models.backends.heads.weights import HeadWeights
        from outrider.system.core import new_core

        weights = HeadWeights.read(new_core(), path, None)

        def table(name: str) -> Table | None:
            return weights.table(name) if name in weights else None

        joint, confidence = table("markov.joint"), table("markov.confidence")
        return cls(
            vocab_size,
            table("markov.before"),
            table("markov.after"),
            None if joint is None else joint[:],
            None if confidence is None else confidence[:][0],
            weights.number("soft_cap"),
            subset,
            weights.number(SCALE) if SCALE in weights else 1.0,
            int(weights.number(TOP_K)) if TOP_K in weights else 0,
        )

    @property
    def newest_drafts(self) -> bool:
        """Whether a block's first row, of the newest token, drafts, too."""
        return not self.top_k

    @property
    def reads_states(self) -> bool:
        """Whether it reads hidden states of the block."""
        return self.joint is not None or self.confidence is not None or self.top_k > 0

    def correction(self, states: Numbers | None) -> Correction:
        """Begin a draft. states: `block_states`, float32 [places, width]."""
        return Correction(self, states)


class Correction:
    """The correction of one draft, place by place. states: see `MarkovHead.correction`."""

    def __init__(self, head: MarkovHead, states: Numbers | None) -> None:
        self._head, self._states, self._place = head, states, 0
        self._memory: Numbers | None = None  # [rank], of a recurrent f

    def next(self, row: LogitsRow, before: int) -> tuple[LogitsRow, float | None]:
        """Correct the next place's row, and say the chance of its token.

        row: of the drafter's own logits. before: the token before, in the main model's ids.
        """
        head = self._head
        states = np.zeros(0, np.float32) if self._states is None else self._states[self._place]
        self._place += 1
        candidates, logits = _likeliest(row)
        if 0 < head.top_k < len(candidates):
            kept = np.sort(np.argpartition(logits, -head.top_k)[-head.top_k :])
            candidates, logits = candidates[kept], logits[kept]
        logits = logits * np.float32(head.scale)
        if head.soft_cap:
            logits = np.float32(head.soft_cap) * np.tanh(logits / np.float32(head.soft_cap))
        embedded = np.zeros(0, np.float32) if head.before is None else head.before[[self._index_of(before)]][0]
        chance = None
        if head.confidence is not None:
            chance = float(_sigmoid(states[-1] + (head.confidence * embedded).sum()))
            states = states[:-1]
        if head.after is not None:
            logits = logits + head.after[candidates] @ self._f(embedded, states)
        token_ids = candidates if head.subset is None else head.subset.token_ids[candidates]
        return _row_of(token_ids, logits, head.vocab_size), chance

    def _index_of(self, token_id: int) -> int:
        """The row of W1 for a token."""
        subset = self._head.subset
        if subset is None:
            return token_id
        at = int(np.searchsorted(subset.token_ids, token_id))
        return at if at < len(subset.token_ids) and subset.token_ids[at] == token_id else len(subset.token_ids)

    def _f(self, embedded: Numbers, states: Numbers) -> Numbers:
        """What W2 is multiplied by, float32 [rank]."""
        joint, rank = self._head.joint, len(embedded)
        if self._head.top_k:
            return embedded * states
        if joint is None:
            return embedded
        if joint.shape[1] == rank:
            return _sigmoid(joint @ embedded + states) * embedded
        memory = np.zeros(rank, np.float32) if self._memory is None else self._memory
        gate, candidate, out = np.split(joint @ np.concatenate([memory, embedded]) + states, 3)
        gate = _sigmoid(gate)
        self._memory = gate * memory + (1 - gate) * np.tanh(candidate)
        made: Numbers = np.tanh(out)
        return made


def _likeliest(row: LogitsRow) -> tuple[NDArray[np.int64], Logits]:
    """The largest logits of a row, float32 [n], and their ids, int64 [n], ascending. All of a row that is broken.

    Of groups of logits, the largest of each are compared. A few more are found than asked for, never fewer.
    """
    token_ids, logits = row.finite()
    if token_ids is not None:
        return token_ids, logits
    size = len(logits) // (_GROUPS * NUM_CANDIDATES)
    if size > 1:
        groups = logits[: len(logits) // size * size].reshape(size, -1).max(0)
        found = np.flatnonzero(logits >= np.partition(groups, -NUM_CANDIDATES)[-NUM_CANDIDATES])
        if len(found) >= NUM_CANDIDATES:
            return found, logits[found]
    return np.arange(len(logits)), logits


def _row_of(token_ids: NDArray[np.int64], logits: Logits, vocab_size: int) -> LogitsRow:
    """A row of which all logits are −inf but these."""

    def full() -> Logits:
        made = np.full(vocab_size, -np.inf, dtype=np.float32)
        made[token_ids] = logits
        return made

    return LogitsRow(full, ListedLogits(token_ids, logits))


def _sigmoid(values: Numbers) -> Numbers:
    made: Numbers = 0.5 * (1 + np.tanh(0.5 * values))  # which does not overflow
    return made
