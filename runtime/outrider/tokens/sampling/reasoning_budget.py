"""A limit on the tokens of a model's reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.types import Logits

_MOST_TOKENS_OF_CALL = 2_048  # that a call may go on after the budget: its marker alone does not switch that off


@dataclass(frozen=True, slots=True)
class _State:
    is_inside: bool
    is_over: bool = False
    count: int = 0  # tokens of reasoning so far
    last: tuple[int, ...] = ()  # the latest tokens, as many as a marker has
    forced: int | None = None  # tokens of the end so far; None while it is not forced
    is_in_call: bool = False
    has_called: bool = False  # a call has begun within the reasoning


class ReasoningBudget:
    """Ends a model's reasoning after so many tokens, by the tokens that end it.

    What it does depends on the committed tokens and the draft's, so drafts do not change the text. begin, end: the
    markers' token ids. forced: those to write after the last token of reasoning. opened: the prompt has begun it.
    again: whether it may begin several times; the budget is for all together. A token that a grammar bans is not
    forced: the next place where it may stand is waited for.

    call: the token ids around a call within the reasoning, which ends it if the answer ends there. So the end is not
    forced within a call, and after one the model may write one of eos_token_ids instead.

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
        eos_token_ids: Sequence[int] = (),
        call: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        self._budget, self._begin, self._end, self._forced = budget, tuple(begin), tuple(end), tuple(forced)
        self._again, self._eos_token_ids = again, list(eos_token_ids)
        self._call_begin, self._call_end = map(tuple, call or ((), ()))
        self._size = max(map(len, (self._begin, self._end, self._call_begin, self._call_end)))
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
            allowed = [token_id, *(self._eos_token_ids if state.has_called and not state.forced else ())]
            kept = logits[allowed]
            logits[:] = -np.inf
            logits[allowed] = kept

    def _after(self, state: _State, token_id: int) -> _State:
        if state.is_over:
            return state
        if state.forced is not None:
            if token_id != self._forced[state.forced]:
                return state
            if state.forced + 1 < len(self._forced):
                return replace(state, forced=state.forced + 1)
            return _State(is_inside=False, is_over=not self._again, count=state.count)
        state = replace(state, last=(*state.last, token_id)[-self._size :])
        if not state.is_inside:
            begins = state.last[-len(self._begin) :] == self._begin
            return self._limited(replace(state, is_inside=True)) if begins else state
        if state.last[-len(self._end) :] == self._end:
            return replace(state, is_inside=False, is_over=not self._again)
        if self._call_begin and state.last[-len(self._call_begin) :] == self._call_begin:
            state = replace(state, is_in_call=True, has_called=True)
        elif self._call_end and state.last[-len(self._call_end) :] == self._call_end:
            state = replace(state, is_in_call=False)
        return self._limited(replace(state, count=state.count + 1))

    def _limited(self, state: _State) -> _State:
        """The end is forced from now on if the budget is used up, after what the model has written of it."""
        budget = self._budget + _MOST_TOKENS_OF_CALL * state.is_in_call
        if not state.is_inside or state.count < budget:
            return state
        sizes = range(len(self._forced) - 1, 0, -1)
        written = next((size for size in sizes if state.last[-size:] == self._forced[:size]), 0)
        return replace(state, forced=written)
