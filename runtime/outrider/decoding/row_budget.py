"""Decides how many tokens of each sequence a call reads: all that answers need, and pieces of prompts.

    budget = RowBudget(512, "auto", cost)
    counts = budget.share(wanted, decoding, contexts)    # tokens of each sequence, in order of arrival
    budget.took(seconds)                                 # of the call

Answers never wait for rows. Prompts get the rest of `max_num_batched_tokens`, while answers are decoded no more than
the round has time for: a piece of a prompt is computed in the same call, and everybody waits for its end (Agrawal et
al. 2024, "Taming throughput-latency tradeoff in LLM inference with Sarathi-Serve"). Without answers, a piece still
takes half a second at most: a call is never interrupted, so whoever cancels, or comes next, waits for its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from outrider.models.tuning.measure import NEAR, PassCost

SMOOTH_ROUND_SECONDS = 0.1  # seconds: ten tokens a second are more than anyone reads
PIECE_SECONDS = 0.5  # seconds of a piece without answers beside it
SLOWDOWN_FACTOR = 2.0  # a round with a piece of a prompt may take so many times as long as one without
LEAST_PROMPT_ROWS = 64  # for prompts beside answers, if these are in the budget; whatever they take
LEAST_PIECE_TOKENS = 32  # tokens; shorter ones cost nearly as much, as each piece reads all keys and values before it
SHORTEST_SHARE = 0.25  # of the rows for prompts, to those with the least left
_LEAST_ADDED_SHARE = 0.1  # least seconds that a row adds to a call, as a share of the average row's
_CHANGE_LIMITS = (0.5, 4.0)  # of a row's seconds, by one measurement
_SCALE_LIMIT = 16.0  # what a row takes, learned from calls, of what it takes at first; or the other way round


class RowBudget:
    """Shares the rows of each round's call.

    max_num_batched_tokens: most rows of a call, unless the answers alone need more, or the rule of the model's calls
    allows fewer. max_round_seconds: of a round in which answers are decoded; "auto": 0.1, or twice the round's time
    without prompts if that is more. cost: of the model's calls; without it, only rows are limited. part: of these
    seconds, for this model's calls.

    In every round there is a piece of a prompt, if one is left: of `LEAST_PROMPT_ROWS` tokens if there is no time for
    more, and of `LEAST_PIECE_TOKENS` if there is no room. Three quarters of the rows go to prompts in order of arrival,
    one quarter to those with the least left to read. So a prompt of n tokens is read when three quarters of the rows
    were enough for all that came before it, or when one quarter was enough for up to n tokens of each other, whichever
    comes first.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_round_seconds: float | str = "auto",
        cost: PassCost | None = None,
        part: float = 1.0,
    ) -> None:
        room = cost.rule.room if cost else 0
        self._max_rows = min(max_num_batched_tokens, room or max_num_batched_tokens)
        self._max_seconds, self._part = max_round_seconds, part
        self._cost = replace(cost) if cost else None  # its scale follows these calls alone
        self._shared = cost  # which learns what calls without pieces of prompts take
        # Seconds of a prompt's row beside answers, in terms of `_added_row`. At first too many, as the longest measured
        # call may have logits for all its rows, which a piece of a prompt has not. The calls show how many.
        self._prompt_scale = cost(cost.rows[-1]) / cost.rows[-1] / _added_row(cost) if cost else 1.0
        self._scales = self._prompt_scale / _SCALE_LIMIT, self._prompt_scale * _SCALE_LIMIT
        self._reserved = 0.0  # rows for the prompts with the least left, from earlier rounds
        # The last call
        self._is_limited = False
        self._answer_seconds = self._row_seconds = 0.0  # expected, for its answers alone and for each row of a prompt
        self.num_prompt_rows = 0
        self._answers: Sequence[int] = ()
        self._context = 0.0

    def share(
        self,
        wanted: Sequence[int],
        decoding: Sequence[bool],
        contexts: Sequence[int],
        *,
        begun: float = 0.0,
        limited: bool | None = None,
    ) -> list[int]:
        """Tokens of each request for the next call; 0: it waits.

        wanted: tokens that each request has to read, drafts included, in order of arrival. decoding: whether it is an
        answer; else a prompt. contexts: tokens before these. begun: seconds since the round's begin. limited: whether
        answers wait for the call's end; by default, if there are any.
        """
        answers = [i for i, decodes in enumerate(decoding) if decodes]
        prompts = [i for i, decodes in enumerate(decoding) if not decodes]
        self._is_limited = bool(answers) if limited is None else limited
        self._expect([wanted[i] for i in answers], [contexts[i] for i in answers], [contexts[i] for i in prompts])
        counts = [count if decodes else 0 for count, decodes in zip(wanted, decoding, strict=True)]
        if prompts:
            rows = max(self._rows_left([wanted[i] for i in answers], begun), self._least)
            for i, count in zip(prompts, self._split([wanted[i] for i in prompts], rows), strict=True):
                counts[i] = count
        self.num_prompt_rows = sum(counts[i] for i in prompts)
        return counts

    def took(self, seconds: float, padded: int = 0, *, alone: bool | None = None) -> None:
        """Learn from the seconds of the call that was shared last.

        padded: its rows, if more than the rule says. alone: whether nothing else ran meanwhile; None: the cost does not
        learn from the call here.
        """
        if not self._cost or seconds <= 0:
            return
        if self._shared is not None and alone is not None:
            counts = self._answers if alone and not self.num_prompt_rows else ()
            self._shared.observe(counts, self._context, seconds, padded)
        added = seconds - self._answer_seconds
        if not self.num_prompt_rows or added <= 0:  # the answers alone took no longer than a call with prompts
            if self._is_limited:
                self._cost.follow(self._answer_seconds, seconds)
            return
        # One call may have waited for other work, or have compiled kernels: no single one counts for much.
        change = added / (self.num_prompt_rows * self._row_seconds)
        least, most = _CHANGE_LIMITS
        self._prompt_scale *= min(max(change, least), most) ** 0.5
        least, most = self._scales
        self._prompt_scale = min(max(self._prompt_scale, least), most)

    def _expect(self, answers: Sequence[int], contexts: Sequence[int], prompt_contexts: Sequence[int]) -> None:
        """Estimate the seconds of answers, and of a prompt's row. Its context is that of the longest prompt."""
        if self._cost is None:
            return
        self._answers, self._context = answers, sum(contexts) / max(len(contexts), 1)
        self._answer_seconds = self._cost.together(answers, self._context) if answers else 0.0
        if prompt_contexts:
            self._row_seconds = self._prompt_scale * _added_row(self._cost, max(prompt_contexts))

    def _rows_left(self, answers: Sequence[int], begun: float) -> int:
        """Rows for prompts beside these answers."""
        rows = self._max_rows - (self._cost.rule.num_rows(answers) if self._cost and answers else sum(answers))
        if self._cost is None:
            return rows
        if not self._is_limited:
            return min(rows, self._doubled(int(PIECE_SECONDS / self._row_seconds)))
        alone = begun + self._answer_seconds
        if isinstance(self._max_seconds, str):
            seconds = max(SMOOTH_ROUND_SECONDS * self._part, SLOWDOWN_FACTOR * alone)
        else:
            seconds = self._max_seconds * self._part
        return min(rows, max(int((seconds - alone) / self._row_seconds), LEAST_PROMPT_ROWS))

    def _doubled(self, rows: int) -> int:
        """The most rows up to these that are the least piece, doubled some times: few sizes, however times vary."""
        return self._least << max(rows // self._least, 1).bit_length() - 1

    def _split(self, wanted: Sequence[int], rows: int) -> list[int]:
        """Share rows among prompts."""
        counts = [0] * len(wanted)

        def give(order: Iterable[int], rows: int) -> int:
            """Give rows to prompts in this order. Returns those that are left."""
            for i in order:
                count = self._piece(wanted[i] - counts[i], rows)
                counts[i] += count
                rows -= self._padded(count)
            return rows

        self._reserved += SHORTEST_SHARE * rows
        reserved = min(int(self._reserved), rows)
        taken = reserved - give(sorted(range(len(wanted)), key=wanted.__getitem__), reserved)
        self._reserved = min(self._reserved - taken, self._least)
        give(range(len(wanted)), rows - taken)
        return counts

    def _piece(self, wanted: int, rows: int) -> int:
        """Tokens of a prompt's next piece in so many rows: all, or whole multiples of the least piece."""
        if self._padded(wanted) <= rows:
            return wanted
        return rows - rows % self._least

    def _padded(self, count: int) -> int:
        """Rows of a piece."""
        return self._cost.rule.sequence(count) if self._cost and count else count

    @property
    def _least(self) -> int:
        """Tokens of the least piece: rows that the machine's rule does not pad."""
        return self._cost.rule.sequence(LEAST_PIECE_TOKENS) if self._cost else LEAST_PIECE_TOKENS


def _added_row(cost: PassCost, context: float = NEAR) -> float:
    """Seconds that a row adds to a call, at this context."""
    first, last = cost.rows[0], cost.rows[-1]
    average = cost(last, context) / last
    added = (cost(last, context) - cost(first, context)) / max(last - first, 1)
    return max(added, _LEAST_ADDED_SHARE * average)
