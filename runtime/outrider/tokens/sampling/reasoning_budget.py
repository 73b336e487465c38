"""A limit on the tokens of a model's reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.types import Logits


@dataclass(frozen=True, slots=True)
class _State:
    """count: tokens of reasoning so far. last: the latest tokens, as many as a marker has. forced: of the end, so far;
    None while it is not forced.
    """

    is_inside: bool
    is_over: bool = False
    count: int = 0
    last: tuple[int, ...] = ()
    forced: int | None = None


class ReasoningBudget:
    """Ends a model's reasoning after so many tokens, by the tokens that end it.

    What it does depends on the committed tokens and the draft's, so drafts do not change the text. begin, end: the
    markers' token ids. forced: those to write after the last token of reasoning. opened: the prompt has begun it.
    again: whether it may begin several times; the budget is for all together. A token that a grammar bans is not
    forced: the next place where it may stand is waited for.

    Source: Qwen3's thinking budget (technical report, section 4.7), with the end marker alone.
    """

    def __init__(
        self,
        budget: int,
        begin: Sequence[int],
        end: Sequence[int],
        forced: Sequence[int],
        *,
        opened: bool,
        again: bool = False,
    ) -> None:
        self._budget, self._begin, self._end, self._forced = budget, tuple(begin), tuple(end), tuple(forced)
        self._again = again
        self._state = self._limited(_State(is_inside=opened))

    def commit(self, token_ids: Sequence[int]) -> None:
        """Count tokens of the answer."""
        for token_id in token_ids:
            self._state = self._after(self._state, token_id)

    def apply(self, logits: Logits, prefix: Sequence[int]) -> None:
        """Leave one token, in place, where the reasoning has to end."""
        state = self._state
        for token_id in prefix:
            state = self._after(state, token_id)
        if state.forced is None:
            return
        token_id = self._forced[state.forced]
        if logits[token_id] > -np.inf:
            logits[:] = -np.inf
            logits[token_id] = 0

    def _after(self, state: _State, token_id: int) -> _State:
        if state.is_over:
            return state
        if state.forced is not None:
            if token_id != self._forced[state.forced]:
                return state
            if state.forced + 1 < len(self._forced):
                return replace(state, forced=state.forced + 1)
            return _State(is_inside=False, is_over=not self._again, count=state.count)
        size = max(len(self._begin), len(self._end))
        state = replace(state, last=(*state.last, token_id)[-size:])
        if not state.is_inside:
            begins = state.last[-len(self._begin) :] == self._begin
            return self._limited(replace(state, is_inside=True)) if begins else state
        if state.last[-len(self._end) :] == self._end:
            return replace(state, is_inside=False, is_over=not self._again)
        return self._limited(replace(state, count=state.count + 1))

    def _limited(self, state: _State) -> _State:
        """The end is forced from now on if the budget is used up, after what the model has written of it."""
        if not state.is_inside or state.count < self._budget:
            return state
        sizes = range(len(self._forced) - 1, 0, -1)
        written = next((size for size in sizes if state.last[-size:] == self._forced[:size]), 0)
        return replace(state, forced=written)
