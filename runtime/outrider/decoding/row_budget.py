"""Decides how many tokens of each sequence a call reads: all that answers need, and pieces of prompts.

    budget = RowBudget(512, "auto", cost)
    counts = budget.share(wanted, decoding, contexts)    # tokens of each sequence, in order of arrival

Answers never wait for rows. Prompts get the rest of `max_num_batched_tokens`, while answers are decoded no more than
the round has time for: a piece of a prompt is computed in the same call, and everybody waits for its end (Agrawal et
al. 2024, "Taming throughput-latency tradeoff in LLM inference with Sarathi-Serve"). Without answers, a piece still
takes half a second at most: a call is never interrupted, so whoever cancels, or comes next, waits for its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.models.cost.table import CallCost

SMOOTH_ROUND_SECONDS = 0.1  # seconds: ten tokens a second are more than anyone reads
PIECE_SECONDS = 0.5  # seconds of a piece without answers beside it
SLOWDOWN_FACTOR = 2.0  # a round with a piece of a prompt may take so many times as long as one without
LEAST_PROMPT_ROWS = 64  # for prompts beside answers, if these are in the budget; whatever they take
LEAST_PIECE_TOKENS = 32  # tokens; shorter ones cost nearly as much, as each piece reads all keys and values before it
SHORTEST_SHARE = 0.25  # of the rows for prompts, to those with the least left


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
        cost: CallCost | None = None,
        part: float = 1.0,
    ) -> None:
        room = cost.rule.room if cost else 0
        self._max_rows = min(max_num_batched_tokens, room or max_num_batched_tokens)
        self._max_seconds, self._part = max_round_seconds, part
        self._cost = cost
        self._reserved = 0.0  # rows for the prompts with the least left, from earlier rounds

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
        counts = [count if decodes else 0 for count, decodes in zip(wanted, decoding, strict=True)]
        if not prompts:
            return counts
        of_answers = [wanted[i] for i in answers]
        rows = self._max_rows - (self._cost.rule.num_rows(of_answers) if self._cost and answers else sum(of_answers))
        if self._cost is not None:
            context = sum(contexts[i] for i in answers) / max(len(answers), 1)
            alone = begun + (self._cost.together(of_answers, context) if answers else 0.0)
            waits = bool(answers) if limited is None else limited
            row = self._cost.prompt_row(max(contexts[i] for i in prompts))
            rows = min(rows, self._rows_in(alone if waits else None, row))
        for i, count in zip(prompts, self._split([wanted[i] for i in prompts], max(rows, self._least)), strict=True):
            counts[i] = count
        return counts

    def _rows_in(self, alone: float | None, row: float) -> int:
        """Rows for prompts that there is time for.

        alone: seconds of the round without them; None: nobody waits for its end. row: seconds of a prompt's row.
        """
        if alone is None:
            return self._doubled(int(PIECE_SECONDS / row))
        if isinstance(self._max_seconds, str):
            seconds = max(SMOOTH_ROUND_SECONDS * self._part, SLOWDOWN_FACTOR * alone)
        else:
            seconds = self._max_seconds * self._part
        return max(int((seconds - alone) / row), LEAST_PROMPT_ROWS)

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
