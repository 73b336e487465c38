"""The rows of a model's states: which are free, which sequences hold, and which the prefix cache has.

A layer with a state, such as a gated delta net, Mamba-2 or a short convolution, keeps what it has read of a sequence in
one row of a table, of a fixed size. A call reads the row that belongs to the sequence's length and writes others, so
that a row is what a full block is to attention: never written again while anybody may read it. A sequence goes back to
a length by reading the row of that length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider.models.kv.block_tree import Block

ZERO_ROW = 0  # the state before the first token; never written
SPARE_ROW = 1  # what padding writes; nobody reads it
NUM_FIXED = 2  # rows that belong to no sequence
# Rows that an open sequence may always have: where it cannot go back any further, where its last round began, where it
# is, what the next call writes, and what that call's padding writes.
ROWS_PER_SEQUENCE = 5
LAST = 1 << 30  # an interval of which only the last state of a call is stored
_MOST_BACK = 32  # rows of tokens that a sequence may drop again
_MOST_INNER = 8  # rows that a piece of a prompt stores for one that is wanted


@dataclass(frozen=True, slots=True)
class StateCall:
    """What a call does with a sequence's states: reads `row`, and stores the states after `lengths` tokens.

    The states are stored in `stored` wherever `interval` divides the number of tokens, counted from `past` on, and the
    last one. An interval of 0 would store nothing with some operators (PagedSelectiveSSM in OpenVINO 2026.4).
    """

    row: int
    past: int  # tokens before the call, as the operators count them
    interval: int
    lengths: tuple[int, ...]
    stored: tuple[int, ...]


@dataclass(slots=True)
class _Place:
    """Where a published row is in the tree of blocks, and when it was used last."""

    block: Block
    offset: int
    used: int

    @property
    def num_saved(self) -> int:
        """Tokens that need not be read because of this row: those after the nearest row before it."""
        before = max((each for each in self.block.rows if each < self.offset), default=0)
        if before:
            return self.offset - before
        count, block = self.offset, self.block.parent
        while block is not None and not block.rows:
            count += len(block.token_ids)
            block = block.parent
        return count if block is None else count + len(block.token_ids) - max(block.rows)


class StateRows:
    """The rows of one cache's tables, by number.

        rows = StateRows(64, spacing=256)
        held = rows.open(0)                      # of a sequence that begins
        call = held.plan(0, 30, interval=LAST)    # of its next call, of 30 tokens
        held.store(call)
        held.close()

    A row that several hold is counted. A published row is held by the prefix cache. When rows are needed, those go
    first that sequences need not have, then published ones: the one that saves the fewest tokens, by how long ago it
    was used. Not during a call.

    spacing: least tokens between the rows that are published of a prompt's pieces.
    """

    def __init__(self, num_rows: int, spacing: int) -> None:
        self.num_rows, self.spacing = num_rows, spacing
        self._free = list(range(num_rows - 1, NUM_FIXED - 1, -1))  # last in, first out: rows that are in memory
        self._holders = [0] * num_rows
        self._published: dict[int, _Place] = {}
        self._open: dict[SequenceRows, None] = {}
        self.num_idle = 0  # published rows that no open sequence holds
        self._clock = self.num_evicted = 0
        self.on_evict: Callable[[Block], object] | None = None  # is told of a block that has lost a row

    @property
    def capacity(self) -> int:
        """Rows for sequences and the prefix cache."""
        return self.num_rows - NUM_FIXED

    @property
    def num_used(self) -> int:
        """Rows that open sequences hold."""
        return self.capacity - len(self._free) - self.num_idle

    @property
    def has_room(self) -> bool:
        """Whether another sequence can be opened."""
        return ROWS_PER_SEQUENCE * (len(self._open) + 1) <= self.capacity

    def open(self, length: int, row: int = ZERO_ROW) -> SequenceRows:
        """The rows of a sequence that begins after `length` tokens, which `row` has."""
        made = SequenceRows(self, length, row)
        self._open[made] = None
        if row in self._published:
            self._clock += 1
            self._published[row].used = self._clock
        return made

    def closed(self, sequence: SequenceRows) -> None:
        """Forget a sequence that is closed."""
        self._open.pop(sequence, None)

    def num_available(self) -> int:
        """About how many rows a sequence's call can have without taking those that others need."""
        spare = sum(len(each.spare()) for each in self._open)
        return len(self._free) + spare + self.num_idle - len(self._open)

    def take(self, most: int, own: SequenceRows) -> list[int]:
        """Up to `most` rows to write to, and at least one. Other sequences' next rows are left."""
        if most + len(self._open) > len(self._free):
            most = max(min(most, self.num_available()), 1)
            own.release(most - len(self._free))
            while most > len(self._free) and self._evict():
                pass
            for each in list(self._open):
                each.release(most - len(self._free))
        if not self._free:
            raise AssertionError("no row of states is left, although each open sequence has some of its own")
        taken = [self._free.pop() for _ in range(min(most, len(self._free)))]
        for row in taken:
            self._holders[row] = 1
        return taken

    def take_spare(self) -> int:
        """A row for padding, for a moment."""
        if not self._free and not self._evict():
            for each in list(self._open):
                each.release(1)
        row = self._free.pop()
        self._holders[row] = 1
        return row

    def hold(self, row: int) -> None:
        """Count one more that reads a row."""
        if row >= NUM_FIXED:
            self._holders[row] += 1
            if row in self._published and self._holders[row] == 2:
                self.num_idle -= 1

    def drop(self, row: int) -> None:
        """Count one less, and free the row after the last."""
        if row >= NUM_FIXED:
            self._holders[row] -= 1
            if not self._holders[row]:
                self._free.append(row)
            elif row in self._published and self._holders[row] == 1:
                self.num_idle += 1

    def publish(self, row: int, block: Block, offset: int) -> None:
        """Let a block of the prefix cache have the row of its first `offset` tokens, if it has none."""
        if row < NUM_FIXED or row in self._published or offset in block.rows:
            return
        self._clock += 1
        block.rows[offset] = row
        self.hold(row)
        self._published[row] = _Place(block, offset, self._clock)

    def unpublish(self, block: Block) -> None:
        """Drop the rows of a block that leaves the prefix cache."""
        for offset in [*block.rows]:
            self._remove(block, offset)

    def _remove(self, block: Block, offset: int) -> None:
        row = block.rows.pop(offset)
        del self._published[row]
        self.num_idle -= self._holders[row] == 1
        self.drop(row)

    def check(self, calls: Iterable[StateCall]) -> None:
        """Raise AssertionError for a call that reads or writes a row that it may not.

        A number beyond a table would overwrite other memory of the process.
        """
        written: set[int] = set()
        for call in calls:
            if not 0 <= call.row < self.num_rows:
                raise AssertionError(f"row {call.row} of states is read, of {self.num_rows}")
            for row in call.stored:
                is_read_only = row == ZERO_ROW or row in self._published
                if not 0 <= row < self.num_rows or is_read_only or row in written:
                    raise AssertionError(
                        f"row {row} of states, of {self.num_rows}, would be written to: it is published or shared"
                    )
                written.add(row)

    def _evict(self) -> bool:
        """Free the published row that saves the least; False if sequences hold all of them."""
        idle = [place for row, place in self._published.items() if self._holders[row] == 1]
        if not idle:
            return False
        least = min(idle, key=lambda place: place.num_saved / (self._clock - place.used + 1))
        self._remove(least.block, least.offset)
        self.num_evicted += 1
        if self.on_evict is not None:
            self.on_evict(least.block)
        return True


class SequenceRows:
    """The rows of one sequence: of the lengths that it can go back to, and those that it is to publish.

    length: tokens that the sequence starts with, whose row is `row`.
    """

    def __init__(self, pool: StateRows, length: int, row: int) -> None:
        pool.hold(row)
        self._pool = pool
        self._rows = {length: row}  # ascending lengths
        self._base = length  # it never goes back any further
        self._commits = (length, length)  # to which it was trimmed in the last two rounds
        self._marks: set[int] = set()  # lengths whose rows are to be published
        self._last_mark = length
        self.branch = 0  # where the texts in the prefix cache part from this one; 0: not known

    @property
    def length(self) -> int:
        """Tokens in the newest row."""
        return next(reversed(self._rows))

    @property
    def num_available(self) -> int:
        """About how many rows its next call can have."""
        return self._pool.num_available()

    def plan(self, past: int, count: int, interval: int, begin: int = 0) -> StateCall:
        """Take the rows for a call of `count` tokens, or fewer: every `interval` tokens, before and after `begin`."""
        end = past + count
        lengths = _lengths(past, end, interval, begin)
        taken = self._pool.take(len(lengths), self)
        while len(lengths) > len(taken):
            interval, begin = (interval * 2, begin) if interval < count else (LAST, 0)
            lengths = _lengths(past, end, interval, begin)
        for row in taken[len(lengths) :]:
            self._pool.drop(row)
        return StateCall(self._rows[past], past + -begin % interval, interval, lengths, tuple(taken[: len(lengths)]))

    def interval_of(self, past: int, count: int, num_rows: int, *, generated: bool) -> tuple[int, int]:
        """The interval for a call, and where it begins: each state of an answer, and those that prompts may start from.

        These are where earlier prompts parted from this one, and in front of the last token, which is never taken from
        the prefix cache because its row is wanted. num_rows: rows of logits of the call.
        """
        end = past + count
        if generated:
            if past < self.branch <= end:
                self.mark(self.branch)
            return 1, 0
        last = end - num_rows + (num_rows > 1) if num_rows else end
        wanted = [each for each in (self.branch, last) if past < each < end]
        if not wanted:
            return LAST if num_rows else self._spaced(past, end), 0
        if count > _MOST_INNER * (apart := abs(wanted[-1] - wanted[0])):
            del wanted[1:]
        for length in wanted:
            self.mark(length)
        return apart if len(wanted) > 1 else count, wanted[0]

    def _spaced(self, past: int, end: int) -> int:
        """The interval for a piece of a long prompt: some rows in it, at least `StateRows.spacing` tokens apart."""
        spacing = self._pool.spacing
        interval = spacing * -(-(end - past) // (_MOST_INNER * spacing))
        if interval >= end - past:
            if end - self._last_mark >= spacing:
                self.mark(end)
            return LAST
        for length in _lengths(past, end, interval):
            self.mark(length)
        return interval

    def mark(self, length: int) -> None:
        """Publish the row of this length, if there is one then."""
        self._marks.add(length)
        self._last_mark = length

    def store(self, call: StateCall) -> None:
        """Keep the rows that a call writes."""
        for length, row in zip(call.lengths, call.stored, strict=True):
            if length in self._rows:  # a call without tokens
                self._free(length)
            self._rows[length] = row

    def exchange(self, length: int, call: StateCall) -> None:
        """Keep the rows that a call has written for another branch after `length`, in place of those after it."""
        for each in [each for each in self._rows if each > length]:
            self._free(each)
        self.store(call)

    def restore(self, length: int) -> int:
        """A row to which the states after `length` tokens are written from a file, and which is published."""
        (row,) = self._pool.take(1, self)
        self._rows[length] = row
        self.mark(length)
        return row

    def drop_call(self, call: StateCall) -> None:
        """Free the rows of a call whose tokens are not kept."""
        for row in call.stored:
            self._pool.drop(row)

    def settle(self, past: int) -> None:
        """Free rows that the sequence will not go back to, before its next call."""
        first = min(self._commits)
        lengths = [*self._rows]
        kept = {*lengths[-_MOST_BACK:]}
        for length in lengths:
            if length != past and (length < first or length not in kept) and self._is_spare(length):
                self._free(length)

    def newest(self, length: int) -> int:
        """The greatest length up to this one that has a row."""
        return max((each for each in self._rows if each <= length), default=0)

    def trim(self, length: int) -> int:
        """Go back to `length` tokens, or as far after as there is a row. Returns that length."""
        if length > self.length:
            return self.length
        for each in [each for each in self._rows if each > length]:
            self._free(each)
        self._marks = {each for each in self._marks if each <= length}
        if not self._rows:
            self._rows[0] = ZERO_ROW
        self._commits = self._commits[1], self.length
        self._base = min(self._base, self.length)
        return self.length

    def skip_to(self, length: int) -> None:
        """Pretend that the sequence has `length` tokens."""
        self.trim(0)
        if length:
            (row,) = self._pool.take(1, self)
            self._rows[length] = row
        self._commits = length, length

    def begin(self, num_published: int) -> int:
        """From now on go back to no length before `num_published`, or the newest row before it. Returns that length."""
        self._base = self.newest(num_published)
        return self._base

    def publish(self, block: Block, begin: int, count: int) -> None:
        """Let a published block have the rows of its first `count` tokens, which the sequence has from `begin` on."""
        for length in self._marks:
            if begin < length <= begin + count and length in self._rows:
                self._pool.publish(self._rows[length], block, length - begin)

    def take_over(self, block: Block, begin: int, end: int) -> None:
        """Take the rows of a block that leaves the prefix cache for this sequence, up to its token `end`."""
        for offset in sorted(block.rows):
            if begin + offset <= end:
                self.mark(begin + offset)
                if begin + offset not in self._rows:
                    self._pool.hold(block.rows[offset])
                    self._rows[begin + offset] = block.rows[offset]
        self._rows = dict(sorted(self._rows.items()))

    def spare(self) -> list[int]:
        """Lengths whose rows would be free without this sequence, which can do without them."""
        return [each for each in self._rows if self._is_spare(each, marked=True) and self._is_own(each)]

    def release(self, count: int) -> None:
        """Free up to `count` rows that the sequence can do without, the oldest first; those to be published last."""
        for length in sorted(self.spare(), key=self._marks.__contains__)[: max(count, 0)]:
            self._free(length)

    def close(self) -> None:
        """Free all rows."""
        for length in [*self._rows]:
            self._free(length)
        self._pool.closed(self)

    def _is_own(self, length: int) -> bool:
        row = self._rows[length]
        return row >= NUM_FIXED and self._pool._holders[row] == 1

    def _is_spare(self, length: int, *, marked: bool = False) -> bool:
        """Whether nothing needs the row of this length. marked: even if it is to be published."""
        needed = length in (self._base, self._commits[1], self.length)
        return not needed and (marked or length not in self._marks)

    def _free(self, length: int) -> None:
        self._pool.drop(self._rows.pop(length))


def _lengths(past: int, end: int, interval: int, begin: int = 0) -> tuple[int, ...]:
    """The lengths whose states a call stores: those that are a multiple of the interval after `begin`, and the last."""
    first = past + interval - (past - begin) % interval
    return (*range(first, end, interval), end)
