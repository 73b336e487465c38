"""What a backend can do: its sizes, how calls are padded, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class FixedShape:
    """The sizes that a model was compiled for. Such a model has one slot, and sequences take turns."""

    window: int  # rows of every call; wanted rows on both sides of a window's end take two calls
    max_prompt_tokens: int
    max_tokens: int  # of prompt and answer


_MAX_ROUNDED_ROWS = 64  # the most that rows are rounded up to
_MOST_DUMMIES = 8


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounds a number of rows up: to at least `least`, and to a multiple of `multiple`."""

    least: int = 1
    multiple: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.least <= _MAX_ROUNDED_ROWS and 1 <= self.multiple <= _MAX_ROUNDED_ROWS):
            raise ValueError(f"rows are rounded up to numbers from 1 to {_MAX_ROUNDED_ROWS}")

    @property
    def is_none(self) -> bool:
        """Whether all numbers stay as they are."""
        return self.least == self.multiple == 1

    def __call__(self, count: int) -> int:
        """Round `count` up."""
        return -(-max(count, self.least) // self.multiple) * self.multiple


@dataclass(frozen=True, slots=True)
class RowRule:
    """The padding of calls, with which a row has the same bits whatever else is in the call.

    sequence: rounds the rows of each sequence. call: rounds the rows of the whole call, after `sequence`. logits:
    rounds the rows of logits. apart: only the attention is padded per sequence. The products with weights, which take
    most of the time, are not.

    separate: each token of an answer is a row that the attention sees as a sequence of its own, so that it is always
    calculated by the kernel for single rows. `sequence` then rounds the pieces of prompts. Keys and values of answers
    have other bits than those of prompts, and the prefix cache tells them apart. dummy_rows: of a sequence that is
    added to each call without a piece of a prompt, because kernels may divide the work by how many rows are alone.

    most: rows of a call; more of them are read in several calls. 0: any number.
    """

    sequence: Rounding = field(default_factory=Rounding)
    call: Rounding = field(default_factory=Rounding)
    logits: Rounding = field(default_factory=Rounding)
    apart: bool = False
    separate: bool = False
    dummy_rows: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        if self.most and self.most < _MAX_ROUNDED_ROWS:  # what rows are rounded up to fits in a call
            raise ValueError(f"a call has at least {_MAX_ROUNDED_ROWS} rows")
        if not 0 <= self.dummy_rows <= _MOST_DUMMIES:
            raise ValueError(f"there are from 0 to {_MOST_DUMMIES} dummy rows")

    def num_rows(self, counts: Iterable[int]) -> int:
        """Rows that a call computes for answers with `counts` rows each, without the dummy rows of every call."""
        is_padded = not (self.apart or self.separate or self.sequence.is_none)
        return self.call(sum(map(self.sequence, counts) if is_padded else counts))

    @property
    def room(self) -> int:
        """Most rows of a call before it is padded as a whole; 0: any number."""
        return (self.most - self.dummy_rows) // self.call.multiple * self.call.multiple if self.most else 0

    def can_add(self, count: int) -> bool:
        """Whether a call may have so many idle rows besides those of its padding."""
        return self.separate or self.sequence(count) == count

    @property
    def num_spare(self) -> int:
        """Positions after a sequence's last token that padding may write to."""
        most = [max(each.least, each.multiple) - 1 for each in (self.sequence, self.call, self.logits)]
        return most[0] + max(most[1:])

    def __str__(self) -> str:
        return self._padding + (f", at most {self.most} a call" if self.most else "")

    @property
    def _padding(self) -> str:
        if self.separate:
            return "each row of an answer a separate sequence" + (
                f", {self.call.least} a call" if self.call.least > 1 else ""
            )
        multiple = max(self.sequence.multiple, self.call.multiple)
        if multiple > 1:
            return f"rows in multiples of {multiple}"
        if self.call.least > 1:
            return f"at least {self.call.least} rows a call"
        if self.sequence.least > 1:
            return f"at least {self.sequence.least} rows a sequence" + (" in the attention" if self.apart else "")
        return "any number of rows"


class RowCost(Protocol):
    """What calls cost."""

    change: float | None  # extra seconds of a call with another number of rows than the one before

    @property
    def version(self) -> int:
        """Of its numbers."""

    def unscaled(self, rows: float) -> float:
        """Seconds of a call with so many rows, in the same unit as `change`."""


class SteadyRows:
    """Pads a call to the rows of the call before, where idle rows cost less than a change of their number.

        steady = SteadyRows(cost, rule, most=16)
        steady.next(3)    # rows of the call that is made now, which needs 3
        steady.peek(2)    # rows of a next call that would need 2: still 3

    A graph in dynamic shapes is prepared again when the number of rows changes. A smaller number is used once it would
    have saved as many seconds as a change takes, counted from the last call that needed more. So idle rows cost at most
    what changes would have (ski rental; Karlin et al. 1988, "Competitive snoopy caching").

    cost: of calls. rule: of all padding. most: rows that calls are padded to.
    """

    def __init__(self, cost: RowCost, rule: RowRule, most: int) -> None:
        self.current = 0  # rows of the last call
        self._cost, self._rule, self._most = cost, rule, most
        self._version, self._seconds = -1, [0.0]  # of calls with 0, 1, … rows
        self._saved: dict[int, float] = {}  # seconds that smaller numbers would have saved
        self._least = 0  # rows of the next call; see `pad`
        self._choices: list[int] = []  # for each smaller number of rows what `peek` gives; empty: not computed yet

    def next(self, need: int) -> int:
        """The rows of the call that is made now, which needs so many. Both by the rule."""
        rows, now = self.peek(need), self.current
        self._saved = {n: self._saves(n) for n in range(need, now) if self._rule.call(n) == n} if rows == now else {}
        self.current, self._least, self._choices = rows, 0, []
        return rows

    def pad(self, rows: int) -> bool:
        """Have the next call padded to at least so many rows, to learn what that takes; False if it cannot be."""
        if not self.current < rows <= self._most or not self._rule.can_add(rows - 1):
            return False
        self._least = rows if self._rule.call(rows) == rows else 0
        return self._least > 0

    def peek(self, need: int) -> int:
        """What `next` would return."""
        if need < self._least:
            return self._least
        now = self.current
        if need >= now or now > self._most or not self._rule.can_add(now - need):
            return need
        if not self._choices:
            self._choices = self._choose()
        return self._choices[need]

    def _saves(self, rows: int) -> float:
        """Seconds that a smaller number would have saved, this call included."""
        return self._saved.get(rows, 0.0) + self._seconds[self.current] - self._seconds[rows]

    def _choose(self) -> list[int]:
        """For each smaller number of rows the one that has saved most, if that is enough; the last call's otherwise."""
        now, best, most = self.current, self.current, 0.0
        if self._version != self._cost.version:  # calls have shown other seconds
            self._version = self._cost.version
            self._seconds = [0.0, *map(self._cost.unscaled, range(1, self._most + 1))]
        choices = [now] * now
        for rows in range(now - 1, -1, -1):
            if self._rule.call(rows) == rows and (saved := self._saves(rows)) >= most:
                best, most = rows, saved
            choices[rows] = now if most < (self._cost.change or 0.0) else best
        return choices


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether rows have the same bits in any batch, measured with one model, device and setting.

    groups: numbers of rows per call without padding, grouped so that rows within a group have the same bits. rule: the
    padding used for the rest of the measurement. differences: for each other way to read the same tokens, the largest
    difference of a logit from a reading in one call; 0 means bit for bit. Empty: nothing was measured.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    rule: RowRule = field(default_factory=RowRule)
    differences: dict[str, float] = field(default_factory=dict)
    is_expected: bool = False  # calls are made as if it held: it is known of such machines, and measured while idle

    @property
    def holds(self) -> bool:
        """Whether it was measured and all differences are 0."""
        return bool(self.differences) and not any(self.differences.values())

    @property
    def largest_difference(self) -> float:
        """The largest of `differences`."""
        return max(self.differences.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. Other parts ask and never assume."""

    # Padded by `rows`, logits do not depend on the rest of the call, nor on the prefix cache. Otherwise they may differ
    # in the last bits, or by the rounding of a quantised cache. True only if measured.
    bit_exact_batching: bool
    rows: RowRule = field(default_factory=RowRule)  # what calls are padded to
    expects_exact: bool = False  # the same is expected, until it is measured
    steady: SteadyRows | None = None  # pads them further where that saves time; None: it does not
    one_call: bool = True  # sequences share the device's call; otherwise they run one after another
    fixed: FixedShape | None = None  # None: chunks and slots may have any size that fits
    features: tuple[str, ...] = ()  # hidden states that a chunk can ask for
    trees: bool = False  # chunks may be trees; their rows have the bits of chains
    adapters: tuple[str, ...] = ()  # that slots can be opened with
    reads_sources: bool = False  # has an encoder, which reads `Prompt.source`
    embeds_width: int = 0  # of the embeddings that prompts may have instead of tokens; 0: it reads token ids only
    long_from: int = 0  # slots for more tokens are rotated by a second set of frequencies; 0: there is none
    states: bool = False  # some layers keep a state: slots go back, and prefixes begin, where there is a row of it

    @property
    def marks_answers(self) -> bool:
        """Whether the prefix cache tells tokens of answers from those of prompts: where their bits differ."""
        return self.rows.separate and (self.bit_exact_batching or self.expects_exact)
