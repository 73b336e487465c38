"""The slots of a model with paged attention: each a sequence's blocks, and the rows of its states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.models.kv import BlockTable, PrefixCounts, SlotTokens, StateCall
from outrider.types import Chunk, Layout, Prompt, embed_keys

if TYPE_CHECKING:
    from outrider.models.backends.paged_cache import PagedCache

SCRATCH = np.zeros(1, dtype=np.int32)  # the block that padding is written to; it belongs to no slot
NUM_SCRATCH = len(SCRATCH)


class PagedSlot(SlotTokens):
    """A sequence's blocks in the cache. `length` tokens of them hold keys and values.

    A branch of a tree has the sequence's blocks up to the last, unfinished one, a copy of that, and blocks of its own
    after it. So its rows are calculated as those of any other sequence.

    If the model has states, a call reads the row of the slot's length, and stores one for each token of an answer, or
    for the end of a prompt's piece. A branch reads the same row, and stores rows of its own.

    branch_blocks: the blocks of each branch beside the first. on_close: is told of what stays in the prefix cache.
    adapter, embeds: of its prompt. most_rows: of a call; 0: any number. first_position: of its first token.
    """

    most_rows = 0
    first_position = 0

    def __init__(self, cache: PagedCache, table: BlockTable, prompt: Prompt, counts: PrefixCounts | None) -> None:
        super().__init__(prompt.token_ids, table.num_cached, counts)
        self.adapter, self.embeds, self._scope = prompt.adapter, prompt.embeds, prompt.scope
        self.on_close, self._num_cached = cache.on_publish, table.num_cached
        self._cache, self._table = cache, table
        self.blocks = _numbers(table)
        self.branch_blocks: list[NDArray[np.int32]] = []
        self._taken: list[list[int]] = []  # of each branch
        self._forked_at = self._num_skipped = 0
        self._tree: tuple[Layout, Sequence[int]]  # of the last call, with its tokens
        self._states = table.rows
        self.state_calls: list[StateCall] = []  # of the next call, or the running one, by branch

    def plan(self, chunk: Chunk) -> list[StateCall]:
        """Take the rows for a call's states, for each branch of its chunk. None if the model has no states."""
        if self._states is None:
            return []
        self._drop_plan()
        past, is_answer = self.length, chunk.generated or chunk.layout.is_tree
        self._states.settle(past)
        for branch in chunk.layout.branches:
            count = len(branch)
            stores = self._states.interval_of(past, count, chunk.num_rows, generated=is_answer)
            self.state_calls.append(self._states.plan(past, count, *stores))
        return self.state_calls

    def take_row(self, length: int) -> int:
        """A row for the states after `length` tokens, which the caller writes, and which are published."""
        if self._states is None:
            raise AssertionError("the model has no states")
        return self._states.restore(length)

    def _drop_plan(self) -> None:
        """Free the rows of a call that was not made, or whose tokens are not kept."""
        for call in self.state_calls:
            if self._states is not None:
                self._states.drop_call(call)
        self.state_calls = []

    def record(self, token_ids: Sequence[int]) -> None:
        """Record the tokens that a call writes."""
        super().record(embed_keys(token_ids, self.embeds, self.length))
        if self._states is not None and self.state_calls:
            self._states.store(self.state_calls.pop(0))

    def check_writable(self) -> None:
        """Raise AssertionError if the next token would be written to a shared block."""
        self._table.check_writable(self.length)

    def discard(self, begin: int, *, whole_blocks: bool) -> None:
        """Drop what a failed call may have written: all from token `begin` on, or from the beginning of its block."""
        self._join()
        kept = begin - begin % self._cache.block_size if whole_blocks else begin
        kept = max(kept, self._table.num_shared)
        if self._states is not None and self._states.newest(kept) < self._table.num_shared:
            kept = begin  # whose row is there
        self._cut(kept)

    def skip_to(self, length: int) -> None:
        """Pretend that the slot holds `length` tokens; see `BenchmarkSlot`.

        Their blocks are written once. Pages that never were are one page of zeros, which is read much faster.
        """
        super().skip_to(length)
        if self._states is not None:
            self._states.skip_to(length)
        for block in self.blocks[self._num_skipped : -(-length // self._cache.block_size)]:
            self._cache.copy_block(0, block)
            self._num_skipped += 1

    def fork(self, count: int, length: int) -> int:
        """Take room for up to `count` branches of up to `length` tokens. Not during a call.

        There is none if one call could not read all of them beside the first one.
        """
        if self.most_rows and (count + 1) * length > self.most_rows:
            return 0
        self._join()
        if self._states is not None:
            count = min(count, self._states.num_available // length - 1)
        begin, size = self.length, self._cache.block_size
        first, end = begin // size, -(-(begin + length) // size)
        for _ in range(count):
            numbers = self._table.take(end - first)
            if numbers is None:
                break
            blocks = self.blocks.copy()
            blocks[first:end] = np.array(numbers, dtype=np.int32) + np.int32(NUM_SCRATCH)
            if begin % size:
                self._cache.copy_block(int(self.blocks[first]), int(blocks[first]))
            self._taken.append(numbers)
            self.branch_blocks.append(blocks)
        self._forked_at = begin
        return len(self._taken)

    def read(self, layout: Layout, token_ids: Sequence[int]) -> None:
        """Record the tokens that a call writes. Of a tree the slot holds the first branch."""
        if layout.is_tree:
            self._tree = layout, token_ids
            token_ids = [token_ids[i] for i in layout.branches[0]]
        self.record(token_ids)

    def keep(self, path: Sequence[int]) -> None:
        """Of the last call's tree keep this path of the draft. Its blocks become the sequence's."""
        layout, token_ids = self._tree
        kept = layout.kept(path)
        at = next(i for i, branch in enumerate(layout.branches) if branch[: len(kept)] == kept)
        if at:
            self._taken[at - 1] = self._table.exchange(self._forked_at // self._cache.block_size, self._taken[at - 1])
            self.blocks = _numbers(self._table)
        super().trim(self._forked_at)
        super().record(embed_keys([token_ids[i] for i in kept], self.embeds, self.length))
        if self._states is not None:
            if at:
                self._states.exchange(self._forked_at, self.state_calls.pop(at - 1))
            self._cut(self.length)
        self._join()

    def _join(self) -> None:
        """Give back the branches' blocks and rows."""
        self._drop_plan()
        for numbers in self._taken:
            self._table.give(numbers)
        self._taken, self.branch_blocks = [], []

    def trim(self, length: int) -> None:
        """Drop the newest tokens until `length` are left. Their keys and values are overwritten next.

        With states it goes back further, if there is no row of that length: to the newest one before it.

        Raises:
            ValueError: when that would trim published tokens, which other slots may share.
        """
        if length < min(self._table.num_shared, self.length):
            raise ValueError(f"{self._table.num_shared} tokens of this slot are shared: it cannot go back to {length}.")
        self._cut(length)

    def _cut(self, length: int) -> None:
        """Drop the newest tokens, with the rows of their states."""
        if self._states is not None:
            least = self._states.newest(length)
            if least < self._table.num_shared:
                raise ValueError(
                    f"{self._table.num_shared} tokens of this slot are shared, and its states were kept for {least} of "
                    f"the first {length}: it cannot go back there."
                )
            length = self._states.trim(length)
        super().trim(length)

    def publish(self, token_ids: Sequence[int]) -> None:
        """Publish the slot's part of `token_ids`, which are committed. Not during a call."""
        super().publish(embed_keys(token_ids, self.embeds))
        self._table.publish(self.published_token_ids)
        self.blocks = _numbers(self._table)

    @property
    def num_shared(self) -> int:
        """Tokens in shared blocks, which are never written."""
        return self._table.num_shared

    def close(self) -> None:
        """Free the blocks. Published ones stay until they are evicted. Closing twice does no harm."""
        self._join()
        self._table.close(self.published_token_ids)
        on_close, self.on_close = self.on_close, None
        if on_close is not None and self.length > self._num_cached:
            on_close(self.published_token_ids, self._scope)


def _numbers(table: BlockTable) -> NDArray[np.int32]:
    """The tensors' blocks of a sequence, in the order of the text."""
    return np.array(table.blocks, dtype=np.int32) + np.int32(NUM_SCRATCH)
