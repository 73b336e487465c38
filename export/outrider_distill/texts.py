"""A text of the main model, while it is written and when it is finished; what it needs of a row of logits.

Rows are read one by one: a row fits in a core's cache, a batch of them does not. Each is passed over twice. All that is
expensive works on the few tokens that are near the likeliest.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import DeviceError
from outrider.types import Logits, Noise

_LEAST, _DISTINCT = 64, 0.25  # tokens, and the share of them that are different
_REPEATED, _TIMES = 24, 3


def is_loop(token_ids: Sequence[int]) -> bool:
    """Whether a text has few different tokens, or ends in 24 tokens that were there twice before.

    Any drafter gets such a text right, so that it teaches nothing.
    """
    count = len(token_ids)
    if count < _LEAST:
        return False
    if len(set(token_ids)) < _DISTINCT * count:
        return True
    array = np.asarray(token_ids)
    windows = np.lib.stride_tricks.sliding_window_view(array, _REPEATED)
    same = np.flatnonzero(windows[:, -1] == array[-1])  # few: the others need not be compared
    return int((windows[same] == array[-_REPEATED:]).all(1).sum()) >= _TIMES


LOOK = 16  # tokens between two looks for loops


@dataclass(frozen=True, slots=True)
class WritingTask:
    """A text to write. token_ids: of the prompt, up to where the answer begins. temperature: 0 is greedy.

    number: with the seed and the position, it determines the random numbers of the text.
    """

    number: int
    token_ids: Sequence[int]
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class DistillText:
    """A prompt of n tokens with its answer, T tokens in all.

    token_ids: int32 [T], with the token that ended it. reason: "stop", "length" or "loop". top_ids int32 and top_probs
    float16 [T, 32]: after each token the likeliest next ones at temperature 1, descending, -1 and 0 beyond those kept,
    and in rows whose next token is none of the answer. features: float16 [T, width], side by side in the order of
    `Writer.features`; None if there are none.
    """

    number: int
    num_prompt_tokens: int
    token_ids: NDArray[np.int32]
    reason: str
    top_ids: NDArray[np.int32]
    top_probs: NDArray[np.float16]
    features: NDArray[np.float16] | None


class Running:
    """A text that is being written, in its slot of the cache."""

    def __init__(self, task: WritingTask, slot: Any, max_new_tokens: int, seed: int) -> None:
        self.task, self.slot, self._max_new_tokens = task, slot, max_new_tokens
        self.unread: Sequence[int] = task.token_ids  # tokens that the model has to read yet
        self.answer: list[int] = []
        self.reason = ""
        self._states: NDArray[np.float16] | None = None
        self._num_states = 0
        self._top_ids = np.full((max_new_tokens, NUM_KEPT), -1, dtype=np.int32)
        self._top_probs = np.zeros((max_new_tokens, NUM_KEPT), dtype=np.float16)
        self._uniforms = Noise(seed, task.number).uniforms(0, "answer", max_new_tokens) if task.temperature else None

    @property
    def is_read(self) -> bool:
        """Whether the text has ended and the model has read it, so that its hidden states are there."""
        return bool(self.reason) and (self._states is None or not self.unread)

    def keep(self, states: NDArray[np.float16]) -> None:
        """Store the hidden states of the next tokens, float16 [n, width]."""
        if self._states is None:
            length = len(self.task.token_ids) + self._max_new_tokens
            self._states = np.empty((length, states.shape[1]), dtype=np.float16)
        self._states[self._num_states : self._num_states + len(states)] = states
        self._num_states += len(states)

    def go_on(self, logits: NDArray[np.float32], ends: Container[int]) -> None:
        """Choose the next token from a row, float32 [vocab]."""
        near, count = near_best(logits), len(self.answer)
        token_ids, probs = likeliest(near)
        self._top_ids[count, : len(token_ids)] = token_ids
        self._top_probs[count, : len(token_ids)] = probs
        token_id = near.best
        if self._uniforms is not None:
            token_id = draw(near, self.task.temperature, float(self._uniforms[count]))
        self.answer.append(token_id)
        self.unread = [token_id]
        if token_id in ends:
            self.reason = "stop"
        elif (count + 1) % LOOK == 0 and is_loop(self.answer):
            self.reason = "loop"
        elif count + 1 == self._max_new_tokens:
            self.reason = "length"

    def text(self) -> DistillText:
        """The finished text."""
        before, count = len(self.task.token_ids), len(self.answer)
        # The row after token t is of token t + 1: the first comes after the prompt's last token.
        top_ids = np.full((before + count, NUM_KEPT), -1, dtype=np.int32)
        top_probs = np.zeros((before + count, NUM_KEPT), dtype=np.float16)
        top_ids[before - 1 : -1], top_probs[before - 1 : -1] = self._top_ids[:count], self._top_probs[:count]
        token_ids = np.array([*self.task.token_ids, *self.answer], dtype=np.int32)
        states = None if self._states is None else self._states[: before + count]
        return DistillText(self.task.number, before, token_ids, self.reason, top_ids, top_probs, states)


NUM_KEPT = 32
# Nats below the likeliest token. Those farther away count as 0: each has less than 1.2e-7 of its probability.
_MARGIN = 16.0
LEAST = 1e-4  # the smallest probability to keep, as a share of the likeliest token's


class Near(NamedTuple):
    """The tokens of a row that are near the likeliest.

    best: the likeliest. token_ids: int64 [n], ascending. logits: float32 [n], less the largest.
    """

    best: int
    token_ids: NDArray[np.int64]
    logits: NDArray[np.float32]


def near_best(logits: Logits) -> Near:
    """The tokens near the likeliest. logits: float32 [vocab].

    Raises:
        DeviceError: when the largest logit is not finite, which only broken weights or a broken driver produce.
    """
    best = int(logits.argmax())
    highest = logits[best]
    if not np.isfinite(highest):
        raise DeviceError(
            f"The main model's logits are not finite ({highest} for token {best}). Check the bundle with "
            "'outrider inspect --check'."
        )
    token_ids = np.flatnonzero(logits > highest - np.float32(_MARGIN))
    return Near(best, token_ids, logits[token_ids] - highest)


def draw(near: Near, temperature: float, uniform: float) -> int:
    """A token sampled at a temperature above 0. uniform: in [0, 1), the place in the cumulative distribution."""
    sums = np.exp(near.logits / np.float32(temperature)).cumsum(dtype=np.float64)
    at = int(sums.searchsorted(uniform * sums[-1], side="right"))
    return int(near.token_ids[min(at, len(sums) - 1)])


def likeliest(near: Near) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The likeliest tokens, int64 [n], and their probabilities at temperature 1, float32 [n], descending.

    At most `NUM_KEPT`, and those only that have 1e-4 of the likeliest one's probability.
    """
    weights = np.exp(near.logits)
    kept = np.flatnonzero(weights > LEAST)
    if len(kept) > NUM_KEPT:
        kept = kept[np.argpartition(weights[kept], -NUM_KEPT)[-NUM_KEPT:]]
    kept = kept[np.lexsort((kept, -weights[kept]))]
    return near.token_ids[kept], weights[kept] / weights.sum(dtype=np.float64).astype(np.float32)
