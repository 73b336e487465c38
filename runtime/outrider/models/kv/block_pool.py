"""The blocks of a paged KV cache, and the prefix cache in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from outrider.errors import DeviceError
from outrider.models.kv.block_tree import Block, Root
from outrider.models.kv.state_rows import ZERO_ROW, SequenceRows, StateRows


class BlockPool:
    """Allocates the blocks of one cache to sequences, with blocks of cached prefixes among them.

        pool = BlockPool(num_blocks=64, block_size=32)
        table = pool.open(100, prompt_token_ids)    # None while others hold the room
        table.blocks                                # 4 numbers, in the order of the text
        table.num_cached                            # tokens of a cached prefix
        table.publish(token_ids)                    # committed tokens: others may start from them
        table.close(token_ids)

    Published full blocks form a tree. A block's parent holds the tokens before it. Published blocks are never written
    again (`check_unpublished` and `BlockTable.check_writable` hold it), and tables share them by reference. The last
    block of a prefix may be part full; a table copies what it needs of it. Blocks that no table uses stay in the tree
    until their room is needed. Then the least recently used ones are evicted, the end of a prefix before its beginning.
    Each saves as many tokens as another, except in models with states: there, an end without a row saves none, and
    goes first.

    If the cache cannot grow, the pool works with the blocks it has, if these are enough.

    num_blocks: blocks allocated now. block_size: tokens per block. max_blocks: the most blocks. grow: a function that
    makes the cache larger. The cache grows at least twofold each time, so that copying stays cheap. rows: of the states
    of models that have some. Their tables start from the longest cached prefix that has a row.

    Source: vLLM's prefix caching and SGLang's radix tree (Zheng et al. 2024), reduced to what both share.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_blocks: int | None = None,
        grow: Callable[[int], None] | None = None,
        rows: StateRows | None = None,
    ) -> None:
        self.rows = rows
        if rows is not None:
            rows.on_evict = self._expose
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_blocks = num_blocks if max_blocks is None else max_blocks
        self._grow = grow
        # Last in, first out: a block that was used before is in memory already.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._roots: dict[bytes, Root] = {}  # of each scope's tree, while that has blocks
        self._published: set[int] = set()  # numbers of the blocks in all trees
        self._idle: OrderedDict[Block, None] = OrderedDict()  # in the tree, used by no table; the oldest first
        self.num_evicted = 0
        self.expected: tuple[bytes, tuple[int, ...]] = b"", ()  # a text that is to begin has these tokens of another

    @property
    def num_free(self) -> int:
        """Free blocks, including those that the cache may still grow by."""
        return len(self._free) + self.max_blocks - self.num_blocks

    @property
    def num_idle(self) -> int:
        """Published blocks that no table uses."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that tables hold."""
        return self.max_blocks - self.num_free - self.num_idle

    @property
    def max_tokens(self) -> int:
        """Most tokens of one table, if no other holds a block."""
        return self.max_blocks * self.block_size

    def open(
        self, num_tokens: int, token_ids: Sequence[int] = (), scope: bytes = b"", wholes: Sequence[tuple[int, int]] = ()
    ) -> BlockTable | None:
        """A table for `num_tokens` tokens that begin with `token_ids`; None while others hold the blocks.

        The last of `token_ids` is never taken from the prefix cache, because its row is wanted. Scopes share nothing.
        wholes: parts of `token_ids`, each from one position up to another, of which all are taken from the prefix cache
        or none.
        """
        text = tuple(token_ids[: max(min(len(token_ids), num_tokens) - 1, 0)])
        root = self._roots.get(scope) or Root(scope)
        shared, source, num_common = self._nearest(text, root)
        for begin, end in wholes:
            if begin < len(shared) * self.block_size + num_common < end:
                text = text[:begin]
                shared, source, num_common = self._nearest(text, root)
        begun = len(shared) * self.block_size
        rows, num_found = None, begun + num_common
        if self.rows is not None:
            if not self.rows.has_room:
                return None
            shared, source, num_common, row = self._to_row(text, shared, root)
            begun = len(shared) * self.block_size
            rows = self.rows.open(begun + num_common, row)
            scope_of, expected = self.expected
            is_expected = scope_of == scope and text[: len(expected)] == expected
            rows.branch = max(num_found, len(expected) if is_expected else 0)
        self._hold(shared)
        if source is not None and source in self._idle:
            self._idle.move_to_end(source)
        try:
            own = self._take(-(-num_tokens // self.block_size) - len(shared))
        except BaseException:
            self._drop(shared)
            if rows is not None:
                rows.close()
            raise
        if own is None:
            self._drop(shared)
            if rows is not None:
                rows.close()
            return None
        table = BlockTable(self, shared, own, scope, rows)
        table.num_cached = begun + num_common
        if source is None:
            return table
        if num_common == len(source.token_ids) < self.block_size and source in self._idle:
            if rows is not None:
                rows.take_over(source, begun, table.num_cached)
            self._free.append(own[0])
            own[0] = self._remove(source)  # the table continues an ended text in its last block
        elif own[0] != source.number:  # it may have been evicted, but its content is still there
            table.copied_block = source.number
        return table

    def _nearest(self, text: tuple[int, ...], root: Root) -> tuple[list[Block], Block | None, int]:
        """The longest published prefix of a text: its full blocks, the block with its rest, and how much that is."""
        shared = self._find(text, root)
        begun = len(shared) * self.block_size
        return shared, *(shared[-1] if shared else root).nearest(text[begun : begun + self.block_size])

    def _to_row(
        self, text: tuple[int, ...], shared: list[Block], root: Root
    ) -> tuple[list[Block], Block | None, int, int]:
        """The longest published prefix of a text that has a row.

        Returns its full blocks, the block that has its rest and how many tokens that is, and the row. shared: all
        published full blocks that the text begins with.
        """
        for count in range(len(shared), -1, -1):
            parent, begin = shared[count - 1] if count else root, count * self.block_size
            block, offset = parent.nearest_row(text[begin : begin + self.block_size])
            if block is not None:
                row = block.rows[offset]
                if offset == self.block_size:
                    return [*shared[:count], block], None, 0, row
                return shared[:count], block, offset, row
        return [], None, 0, ZERO_ROW

    def num_cached(self, token_ids: Sequence[int], scope: bytes = b"") -> int:
        """How many of these tokens are in full published blocks, or have a row. From any thread; soon out of date."""
        if self.rows is not None:
            return self.last_row(token_ids, scope)[0]
        root = self._roots.get(scope) or Root(scope)
        return len(self._find(tuple(token_ids), root)) * self.block_size

    def last_row(self, token_ids: Sequence[int], scope: bytes = b"") -> tuple[int, int]:
        """The longest published prefix of these tokens that has a row of states: its tokens, and the row."""
        root, text = self._roots.get(scope) or Root(scope), tuple(token_ids)
        found, _, num_more, row = self._to_row(text, self._find(text, root), root)
        return len(found) * self.block_size + num_more, row

    def row_ends(self, token_ids: Sequence[int], scope: bytes = b"") -> list[int]:
        """The lengths of the beginnings of these tokens that have a row of states in the blocks of this text."""
        root, text = self._roots.get(scope) or Root(scope), tuple(token_ids)
        found = self._find(text, root)
        begun, size = len(found) * self.block_size, self.block_size
        last, num_common = (found[-1] if found else root).nearest(text[begun:])
        ends = [i * size + offset for i, block in enumerate(found) for offset in block.rows]
        return ends + [begun + offset for offset in (last.rows if last else ()) if offset <= num_common]

    def blocks_of(self, token_ids: Sequence[int], scope: bytes = b"") -> list[int] | None:
        """The published blocks that hold these tokens, the last one perhaps more; None if not all are published."""
        root = self._roots.get(scope)
        if root is None:
            return None
        text = tuple(token_ids)
        found = self._find(text, root)
        numbers, rest = [block.number for block in found], text[len(found) * self.block_size :]
        if rest:
            last, num_common = (found[-1] if found else root).nearest(rest)
            if last is None or num_common < len(rest):
                return None
            numbers.append(last.number)
        return numbers

    def check_unpublished(self, number: int) -> None:
        """Raise AssertionError for a published block: it is read-only."""
        if number in self._published:
            raise AssertionError(f"block {number} is published, and would be written to")

    def clear(self) -> None:
        """Drop all published blocks that no table uses."""
        while self._idle:
            self._free.append(self._remove(next(iter(self._idle))))

    def _find(self, text: tuple[int, ...], root: Root) -> list[Block]:
        """The published full blocks that a text begins with."""
        found: list[Block] = []
        block: Block | None = root
        for begin in range(0, len(text) - self.block_size + 1, self.block_size):
            block = block.children.get(text[begin : begin + self.block_size]) if block else None
            if block is None:
                break
            found.append(block)
        return found

    def _hold(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.num_users += 1
            self._idle.pop(block, None)

    def _drop(self, blocks: list[Block]) -> None:
        """A user of a block uses its ancestors too. So blocks become idle, and are evicted, before their ancestors."""
        for block in reversed(blocks):
            block.num_users -= 1
            if not block.num_users:
                self._idle[block] = None
                self._expose(block)

    def _expose(self, block: Block) -> None:
        """Evict this block before all others if it is an idle end of which no text can go on: it has no row."""
        if self.rows is not None and not block.rows and not block.children and block in self._idle:
            self._idle.move_to_end(block, last=False)

    def _take(self, wanted: int) -> list[int] | None:
        """Blocks to write to; None, without evicting any, if there are too few."""
        if wanted > self.num_free + self.num_idle:
            return None
        if wanted > len(self._free) and self.num_blocks < self.max_blocks and self._grow:
            least = self.num_blocks + wanted - len(self._free)
            size = min(max(least, 2 * self.num_blocks), self.max_blocks)
            try:
                self._grow(size)
            except DeviceError:
                if wanted > len(self._free) + len(self._idle):
                    raise
                self.max_blocks = size = self.num_blocks  # no more memory: do not try to grow again
            self._free[:0] = range(size - 1, self.num_blocks - 1, -1)
            self.num_blocks = size
        while wanted > len(self._free):
            self._free.append(self._remove(next(iter(self._idle))))
            self.num_evicted += 1
        at = len(self._free) - wanted
        taken = self._free[at:]
        del self._free[at:]
        return taken[::-1]

    def _remove(self, block: Block) -> int:
        """Remove an idle leaf from the tree."""
        del self._idle[block]
        self._published.remove(block.number)
        if self.rows is not None:
            self.rows.unpublish(block)
        parent = block.parent
        if parent is not None:
            parent.remove(block)
            self._expose(parent)
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.scope]
        return block.number

    def _end(self, shared: list[Block], scope: bytes) -> Block:
        """The parent for the next block of a text."""
        return shared[-1] if shared else self._roots.setdefault(scope, Root(scope))

    def _publish(
        self, shared: list[Block], own: list[int], token_ids: Sequence[int], scope: bytes, rows: SequenceRows | None
    ) -> None:
        """Move those of `own` that `token_ids` fill to the end of `shared`."""
        size = self.block_size
        for begin in range(len(shared) * size, len(token_ids) - size + 1, size):
            parent = self._end(shared, scope)
            key = tuple(token_ids[begin : begin + size])
            number = own.pop(0)
            block = parent.children.get(key)
            if block is None:
                block = parent.add(number, key)
                self._published.add(number)
            else:
                self._free.append(number)  # another table has published the same tokens in the meantime
            if rows is not None:
                rows.publish(block, begin, size)
            self._hold([block])
            shared.append(block)

    def _close(
        self, shared: list[Block], own: list[int], token_ids: Sequence[int], scope: bytes, rows: SequenceRows | None
    ) -> None:
        if rows is not None:
            rows.mark(len(token_ids))
        self._publish(shared, own, token_ids, scope, rows)
        begin = len(shared) * self.block_size
        if rows is not None and shared:  # its last block may have been published before its end was known
            rows.publish(shared[-1], begin - self.block_size, self.block_size)
        rest = tuple(token_ids[begin:])
        if rest:
            parent = self._end(shared, scope)
            same, num_common = parent.nearest(rest)
            if same is None or num_common < len(rest):
                same = parent.add(own.pop(0), rest)
                self._published.add(same.number)
                self._idle[same] = None
            elif same in self._idle:
                self._idle.move_to_end(same)
            if rows is not None:
                rows.publish(same, begin, len(rest))
            self._expose(same)
        self._free.extend(reversed(own))
        self._drop(shared)
        if rows is not None:
            rows.close()


class BlockTable:
    """The blocks of one sequence, until it is closed.

    num_cached: tokens of the cached prefix that it started from. copied_block: the block, if any, whose content has to
    be copied to the table's first own block before anything is written. rows: of the states, if there are any.
    """

    def __init__(
        self, pool: BlockPool, shared: list[Block], own: list[int], scope: bytes, rows: SequenceRows | None = None
    ) -> None:
        self.rows = rows
        self.num_cached = 0
        self.copied_block: int | None = None
        self._pool = pool
        self._shared = shared
        self._own = own
        self._scope = scope
        self._closed = False

    @property
    def blocks(self) -> list[int]:
        """The blocks' numbers, in the order of the text."""
        return [*(block.number for block in self._shared), *self._own]

    @property
    def num_shared(self) -> int:
        """Tokens in shared blocks, which are never written."""
        return len(self._shared) * self._pool.block_size

    def check_writable(self, begin: int) -> None:
        """Raise AssertionError if the text's token `begin` is in a shared block: those are read-only."""
        if begin < self.num_shared:
            raise AssertionError(f"token {begin} would be written to a shared block, of {self.num_shared} tokens")

    @property
    def first_own_block(self) -> int:
        """The block of the first token after the shared ones."""
        return self._own[0]

    def take(self, count: int) -> list[int] | None:
        """Further blocks for a while, beside the table's; None if there are too few. See `give` and `exchange`."""
        return self._pool._take(count)

    def give(self, numbers: Sequence[int]) -> None:
        """Give back blocks that were taken."""
        self._pool._free.extend(numbers)

    def exchange(self, index: int, numbers: list[int]) -> list[int]:
        """Put taken blocks into the table, from its block `index` on. Returns those that they take the place of."""
        begin = index - len(self._shared)
        former = self._own[begin : begin + len(numbers)]
        self._own[begin : begin + len(numbers)] = numbers
        return former

    def publish(self, token_ids: Sequence[int]) -> None:
        """Publish the full blocks of these committed tokens. `blocks` may change."""
        if self.rows is not None:
            token_ids = token_ids[: self.rows.begin(len(token_ids))]
        self._pool._publish(self._shared, self._own, token_ids, self._scope, self.rows)

    def close(self, token_ids: Sequence[int] = ()) -> None:
        """Publish `token_ids`, the text's committed beginning, and free the other blocks. Twice does no harm."""
        if not self._closed:
            self._closed = True
            self._pool._close(self._shared, self._own, token_ids, self._scope, self.rows)
            self._shared, self._own = [], []
