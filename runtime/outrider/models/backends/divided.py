"""A call of more rows than a rule allows, as several calls one after another; see `RowRule.most`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from outrider.types import Chunk, LogitsRow, Pending, RowRule, Step, undivided


def divide(chunks: Sequence[Chunk], rule: RowRule) -> list[list[Chunk]]:
    """The calls that read these chunks: of at most `rule.most` rows each, with padding, or one call without a limit.

    Their chunks are pieces of the given ones, in the same order. A tree stays whole, even if it has more rows, and so
    does a span of embeddings that is read in one call: it is alone in its call then.
    """
    room = rule.room
    if not room or sum(_num_rows(chunk, rule) for chunk in chunks) <= room:
        return [[*chunks]]
    calls: list[list[Chunk]] = [[]]
    left = room
    for chunk in chunks:
        rest = chunk
        while (needs := _num_rows(rest, rule)) > left:
            is_tree, least = rest.layout.is_tree, _num_rows(_cut(rest, 0, 1), rule)
            if calls[-1] and (is_tree or least > left):
                calls.append([])
                left = room
            elif is_tree:
                break
            else:
                multiple = 1 if rest.generated and rule.separate else rule.sequence.multiple
                count = _undivided(chunk, rest, left // multiple * multiple)
                if count > left and calls[-1]:
                    calls.append([])
                    left = room
                    continue
                calls[-1].append(_cut(rest, 0, count))
                rest = _cut(rest, count, len(rest.token_ids))
                left = 0
        calls[-1].append(rest)
        left -= needs
    return calls


def _num_rows(chunk: Chunk, rule: RowRule) -> int:
    """Rows of a chunk, with its padding."""
    counts = map(len, chunk.layout.branches)
    return sum(counts if rule.separate and chunk.generated else map(rule.sequence, counts))


def _undivided(chunk: Chunk, rest: Chunk, count: int) -> int:
    """How many tokens of a chunk's rest are read, where `count` would divide a span that is read in one call."""
    begin: int = chunk.slot.length + len(chunk.token_ids) - len(rest.token_ids)
    return undivided(getattr(chunk.slot, "embeds", ()), begin, begin + count) - begin


def _cut(chunk: Chunk, begin: int, end: int) -> Chunk:
    """Some of a chain's tokens, with those of its rows."""
    count, hidden = len(chunk.token_ids), chunk.hidden_states
    return replace(
        chunk,
        token_ids=chunk.token_ids[begin:end],
        num_rows=max(end - max(begin, count - chunk.num_rows), 0),
        hidden_states=None if hidden is None else hidden[begin:end],
    )


class DividedCall:
    """Calls that are submitted one after another, as one pending call.

        DividedCall(backend.submit, divide(chunks, rule)).wait()

    The first one is submitted at once, the others in `wait`, which keeps the rows of those before the last.
    """

    def __init__(self, submit: Callable[[Sequence[Chunk]], Pending], calls: Sequence[Sequence[Chunk]]) -> None:
        self._submit, self._calls = submit, calls
        self._first = submit(calls[0])

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once: never, as calls are left."""
        return False

    def wait(self) -> Step:
        """Submit the other calls, and block until all rows are there; see `Pending`."""
        pending, joined = self._first, _JoinedStep()
        for call, following in zip(self._calls, [*self._calls[1:], None], strict=True):
            joined.add(call, pending.wait())
            if following is not None:
                pending = self._submit(following)
        return joined


@dataclass(slots=True)
class _JoinedStep:
    """The rows of several calls, in host memory."""

    _rows: list[tuple[Chunk, list[LogitsRow]]] = field(default_factory=list)  # of each piece of a chunk
    _features: list[tuple[Chunk, NDArray[np.float32]]] = field(default_factory=list)

    def add(self, chunks: Sequence[Chunk], step: Step) -> None:
        """Copy the rows of a call that has ended."""
        self._rows += [(chunk, [row.copied() for row in step.rows(chunk)]) for chunk in chunks]
        self._features += [(chunk, step.features(chunk).copy()) for chunk in chunks if chunk.features]

    def rows(self, chunk: Chunk) -> list[LogitsRow]:
        """The rows that a chunk asked for."""
        return [row for piece, rows in self._rows if piece.slot is chunk.slot for row in rows]

    def features(self, chunk: Chunk) -> NDArray[np.float32]:
        """The hidden states that a chunk asked for; see `Step`."""
        return np.concatenate([rows for piece, rows in self._features if piece.slot is chunk.slot])
