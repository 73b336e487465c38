"""Measures whether a row's logits have the same bits in any batch. Token-identical text depends on this.

Libraries choose kernels by the number of rows, and kernels add in different orders. On one processor a single row has
other bits than a row among several. On another, rows have the same bits only in calls of 8, 16, … rows. This cannot be
known without measuring.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from outrider.models.cost.slots import open_slot, random_tokens
from outrider.models.tuning.measure.readings import TAIL, compare_quickly, longest_context
from outrider.types import Backend, Chunk, Exactness, PaddedBackend, Rounding, RowRule

# Numbers of rows that are measured at load: all that drafts have, and some of small batches. Kernels for more are
# chosen by the whole tiles in a number, of which some are read in `compare_quickly`.
ROWS = (*range(1, 18), 20, 23, 24, 31, 32)
_SQUARE = [(rows, rows) for rows in ROWS]  # calls of as many rows of logits
_ANSWER_ROWS = (1, 2, 8)  # numbers of rows whose bits differ if any padding is needed
_LOGITS_ROWS = (1, 2, 3, 4, 5, 8, 16)  # numbers of rows of logits
_BEFORE = 190  # tokens of context before these rows; several blocks, and not a multiple of one
TRIAL_CONTEXT = 210  # tokens that are read in several ways
# Most tokens of cache that this takes, and sequences that have states: eight at a time, and some that are published.
TRIAL_TOKENS, TRIAL_SEQUENCES = 4096, 9
_LEAST_CONTEXT = TAIL + 24
_MULTIPLES = (8, 16, 32)
_PIECE_ROWS = range(64, 209, 16)  # numbers of rows in calls with a piece of a prompt


def measure_exactness(backend: PaddedBackend) -> Exactness:
    """Find the least padding with which rows have the same bits in any batch. If there is none, measure differences.

    First, numbers of rows are sorted into groups whose rows have the same bits. Then each padding that would bring all
    calls into one group is tried, the cheapest first: on prompts in pieces, cached prefixes, several sequences and
    rejected drafts. Takes about 150 calls. The backend's cache must be allocated and empty.
    """
    backend.use(Exactness())
    context = min(TRIAL_CONTEXT, longest_context(backend, backend.max_tokens))
    if context < _LEAST_CONTEXT:
        return Exactness()
    if backend.capabilities.fixed:  # all its calls have the same number of rows
        return Exactness(differences=_try(backend, Exactness(), context))
    groups = tuple(_groups(backend, _SQUARE))
    most = _most_rows(backend) if backend.can_divide else 0
    for padding in _rules(backend, groups):
        rule = replace(padding, most=most)
        differences = _try(backend, Exactness(groups, rule), context)
        if not any(differences.values()):
            return Exactness(groups, rule, differences)
    # No padding makes this exact, so none is used: it would only cost time.
    return Exactness(groups, RowRule(), _try(backend, Exactness(groups), context))


def check_exactness(backend: PaddedBackend, made: dict[str, float] | None = None) -> dict[str, float]:
    """The largest differences between a few ways to read the same tokens, by the rule that is in use.

    made: those of earlier calls, which are not measured again; it gets each one as it is found. Empty: the cache has
    too little room.
    """
    context = min(TRIAL_CONTEXT, longest_context(backend, backend.max_tokens))
    return {} if context < _LEAST_CONTEXT else compare_quickly(backend, context, made)


def _try(backend: PaddedBackend, exactness: Exactness, context: int) -> dict[str, float]:
    """The largest logit differences between a few ways to read the same tokens, with this padding."""
    backend.use(exactness)
    return compare_quickly(backend, context)


def _rules(backend: PaddedBackend, groups: Sequence[Sequence[int]]) -> Iterator[RowRule]:
    """Paddings that would bring every call into one group, the cheapest first."""
    least = _least(groups)
    if least is not None:
        logits = Rounding(_least(_groups(backend, [(max(_LOGITS_ROWS) + 1, rows) for rows in _LOGITS_ROWS])) or 1)
        # Before no rule at all: measuring may miss a difference where kernels divide the work as threads are free.
        for rule in backend.separate_rules:
            separate = replace(rule, sequence=Rounding(max(least, 2)), logits=logits)
            backend.use(Exactness(rule=separate))
            of_call = _least(_groups(backend, _SQUARE, generated=True))
            if of_call is not None:
                yield replace(separate, call=Rounding(max(of_call, rule.call.least)))
        if least == 1:
            yield RowRule(logits=logits)
        if backend.can_pad_apart:
            # Attention gets at least two rows. The matrix products may need more padding, or none.
            apart = RowRule(sequence=Rounding(2), logits=logits, apart=True)
            backend.use(Exactness(rule=apart))
            few = _groups(backend, [(rows, rows) for rows in _ANSWER_ROWS])
            of_products = 1 if len(few) == 1 else _least(_groups(backend, _SQUARE))
            if of_products is not None:
                yield replace(apart, call=Rounding(of_products))
        yield RowRule(sequence=Rounding(max(least, 2)), logits=logits)
    for multiple in _MULTIPLES:
        if any(set(group) >= {rows for rows in ROWS if rows % multiple == 0} for group in groups):
            by = Rounding(multiple, multiple)
            yield RowRule(call=by, logits=by)
            if backend.can_pad_apart:
                yield RowRule(sequence=by, call=by, logits=by, apart=True)
            yield RowRule(sequence=by, call=by, logits=by)


def _least(groups: Iterable[Sequence[int]]) -> int | None:
    """The least number of rows from which on all have the same bits; None if it is above 8."""
    last = max(groups, key=max)
    others = [rows for group in groups for rows in group if rows not in last and rows < max(last)]
    least = min((rows for rows in last if rows > max(others, default=0)), default=max(last))
    return least if least <= _MULTIPLES[0] else None


def _most_rows(backend: Backend) -> int:
    """The most rows of a call in which rows have the bits of calls with few rows; 0 if it is any number, or below 64.

    Libraries choose other kernels for many rows, too. All numbers below a limit are taken to be alike, and all above.
    """
    token_ids = random_tokens(backend, _BEFORE + 1)
    with closing(open_slot(backend, len(token_ids))) as slot:
        backend.submit([Chunk(slot, token_ids[:-1], num_rows=0)]).wait()

        def row_among(count: int) -> bytes:
            """The bits of the last token's row in a call of `count` rows, the others of which are a prompt's."""
            slot.trim(_BEFORE)
            with closing(open_slot(backend, count)) as other:
                others = Chunk(other, random_tokens(backend, count - 1), num_rows=0)
                chunks = [Chunk(slot, token_ids[-1:], num_rows=1), others]
                return backend.submit(chunks).wait().rows(chunks[0])[0].full().tobytes()

        few = row_among(ROWS[-1])
        if row_among(_PIECE_ROWS[-1]) == few:
            return 0
        below = bisect.bisect_left(_PIECE_ROWS, True, key=lambda count: row_among(count) != few)
        return _PIECE_ROWS[below - 1] if below else 0


def _groups(backend: Backend, calls: Sequence[tuple[int, int]], *, generated: bool = False) -> list[tuple[int, ...]]:
    """Group calls of (tokens, rows of logits) by the bits of one token's row. Returns the rows of each group's calls.

    The token is the first one; in calls of more tokens than rows, it is the last row's.
    """
    token_ids = random_tokens(backend, _BEFORE + max(count for count, _ in calls))
    groups: dict[bytes, list[int]] = {}
    with closing(open_slot(backend, len(token_ids))) as slot:
        backend.submit([Chunk(slot, token_ids[:_BEFORE], num_rows=0)]).wait()
        for count, num_rows in calls:
            slot.trim(_BEFORE)
            chunk = Chunk(slot, token_ids[_BEFORE : _BEFORE + count], num_rows, generated=generated)
            row = backend.submit([chunk]).wait().rows(chunk)[0 if count == num_rows else -1].full()
            groups.setdefault(row.tobytes(), []).append(num_rows)
    return [tuple(group) for group in groups.values()]
