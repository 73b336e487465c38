"""The blocks that a model's KV cache is cut into, and whose keys and values are in them."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from typing import TYPE_CHECKING

from outrider.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq


class BlockPool:
    """Hands out the blocks of one cache by number, those that hold the beginning of a text already among them.

        pool = BlockPool(num_blocks=64, block_size=32)
        table = pool.open(100, prompt_token_ids)    # None while others hold the room
        table.blocks                                # 4 numbers, in the order of the text
        table.num_cached                            # tokens that are there already
        table.publish(token_ids)                       # committed ones: others may begin with them from now on
        table.close(token_ids)

    Full blocks that were kept form a tree, each under the one that it goes on from, and are never written again: places
    share them by reference. The last block of a text may be part full; what a table needs of it is copied. Blocks that
    no table uses stay until their room is needed; then the least recently used ones go, the end of a text before its
    beginning.

    Where it cannot grow, it makes do with what it has, if that is enough.

    num_blocks: blocks there are. block_size: tokens a block. max_blocks, grow: how many there may be, and what makes
    the cache so large when more are needed; at least twice as large each time, so that copying adds up to little.

    Source: vLLM's prefix caching and SGLang's radix tree (Zheng et al. 2024), in the least that both have in common.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_blocks: int | None = None,
        grow: Callable[[int], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_blocks = num_blocks if max_blocks is None else max_blocks
        self._grow = grow
        # The last block in is the first out: a block that was used is in memory already.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._roots: dict[bytes, _Root] = {}  # of each scope's tree, as long as there is anything in it
        self._idle: OrderedDict[_Block, None] = OrderedDict()  # in the tree, used by no table; the oldest first
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        """Blocks with nothing in them, those included that the cache may grow by."""
        return len(self._free) + self.max_blocks - self.num_blocks

    @property
    def num_idle(self) -> int:
        """Blocks that are kept, but used by no table."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that places hold."""
        return self.max_blocks - self.num_free - self.num_idle

    @property
    def max_tokens(self) -> int:
        """Tokens that fit when nobody else holds a block."""
        return self.max_blocks * self.block_size

    def open(self, num_tokens: int, token_ids: Seq[int] = (), scope: bytes = b"") -> BlockTable | None:
        """A table for `num_tokens` that begin with `token_ids`; None while others hold the room.

        At least the last of `token_ids` is left to be read: its row is wanted. Nothing is shared with another scope.
        """
        text = tuple(token_ids[: max(min(len(token_ids), num_tokens) - 1, 0)])
        root = self._roots.get(scope) or _Root(scope)
        shared = self._find(text, root)
        begun = len(shared) * self.block_size
        source, num_common = (shared[-1] if shared else root).nearest(text[begun : begun + self.block_size])
        self._hold(shared)
        if source is not None and source in self._idle:
            self._idle.move_to_end(source)
        try:
            own = self._take(-(-num_tokens // self.block_size) - len(shared))
        except BaseException:
            self._drop(shared)
            raise
        if own is None:
            self._drop(shared)
            return None
        table = BlockTable(self, shared, own, scope)
        table.num_cached = begun + num_common
        if source is None:
            return table
        if num_common == len(source.token_ids) < self.block_size and source in self._idle:
            self._free.append(own[0])
            own[0] = self._remove(source)  # the table goes on where an ended text stopped
        elif own[0] != source.number:  # which may have been evicted by now, but not been written to
            table.copied_block = source.number
        return table

    def _find(self, text: tuple[int, ...], root: _Root) -> list[_Block]:
        """The full blocks that a text begins with, as far as they are there."""
        found: list[_Block] = []
        block: _Block | None = root
        for begin in range(0, len(text) - self.block_size + 1, self.block_size):
            block = block.children.get(text[begin : begin + self.block_size]) if block else None
            if block is None:
                break
            found.append(block)
        return found

    def _hold(self, blocks: list[_Block]) -> None:
        for block in blocks:
            block.num_users += 1
            self._idle.pop(block, None)

    def _drop(self, blocks: list[_Block]) -> None:
        """Whoever uses a block uses those above it: a block becomes idle before they do, and goes before they go."""
        for block in reversed(blocks):
            block.num_users -= 1
            if not block.num_users:
                self._idle[block] = None

    def _take(self, wanted: int) -> list[int] | None:
        """Blocks to write to; None, and nothing lost, when there are too few."""
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
                self.max_blocks = size = self.num_blocks  # it is as large as it gets: others' memory is not ours
            self._free[:0] = range(size - 1, self.num_blocks - 1, -1)
            self.num_blocks = size
        while wanted > len(self._free):
            self._free.append(self._remove(next(iter(self._idle))))
            self.num_evicted += 1
        at = len(self._free) - wanted
        taken = self._free[at:]
        del self._free[at:]
        return taken[::-1]

    def _remove(self, block: _Block) -> int:
        """Take an idle block that nothing goes on from out of the tree."""
        del self._idle[block]
        parent = block.parent
        if parent is not None:
            parent.remove(block)
        if isinstance(parent, _Root) and not parent.children:
            del self._roots[parent.scope]
        return block.number

    def _end(self, shared: list[_Block], scope: bytes) -> _Block:
        """What the next block of a text is added under."""
        return shared[-1] if shared else self._roots.setdefault(scope, _Root(scope))

    def _publish(self, shared: list[_Block], own: list[int], token_ids: Seq[int], scope: bytes) -> None:
        """Move the first of `own`, as far as `token_ids` fill them, to the end of `shared`."""
        size = self.block_size
        for begin in range(len(shared) * size, len(token_ids) - size + 1, size):
            parent = self._end(shared, scope)
            key = tuple(token_ids[begin : begin + size])
            number = own.pop(0)
            block = parent.children.get(key)
            if block is None:
                block = parent.add(number, key)
            else:
                self._free.append(number)  # another table has read the same in the meantime
            self._hold([block])
            shared.append(block)

    def _close(self, shared: list[_Block], own: list[int], token_ids: Seq[int], scope: bytes) -> None:
        self._publish(shared, own, token_ids, scope)
        rest = tuple(token_ids[len(shared) * self.block_size :])
        if rest:
            parent = self._end(shared, scope)
            same, num_common = parent.nearest(rest)
            if same is None or num_common < len(rest):
                same = parent.add(own.pop(0), rest)
                self._idle[same] = None
            elif same in self._idle:
                self._idle.move_to_end(same)
        self._free.extend(reversed(own))
        self._drop(shared)


class BlockTable:
    """The blocks of one text, until it is closed.

    num_cached: how many of its tokens were in the cache when it was opened. copied_block: the block, if any, whose
    content has to be copied to the first of the table's own ones for that, before anything is written.
    """

    def __init__(self, pool: BlockPool, shared: list[_Block], own: list[int], scope: bytes) -> None:
        self.num_cached = 0
        self.copied_block: int | None = None
        self._pool = pool
        self._shared = shared
        self._own = own
        self._scope = scope
        self._closed = False

    @property
    def blocks(self) -> list[int]:
        """Their numbers, in the order of the text."""
        return [*(block.number for block in self._shared), *self._own]

    @property
    def num_shared(self) -> int:
        """Tokens in the blocks that may have other users: nothing is written there."""
        return len(self._shared) * self._pool.block_size

    @property
    def first_own_block(self) -> int:
        """Where the first token behind the shared ones goes."""
        return self._own[0]

    def publish(self, token_ids: Seq[int]) -> None:
        """Share what is full of the blocks with these tokens, which are in the cache. `blocks` may change."""
        self._pool._publish(self._shared, self._own, token_ids, self._scope)

    def close(self, token_ids: Seq[int] = ()) -> None:
        """Give the blocks back; what is in them of `token_ids`, the text's beginning, stays. Twice does no harm."""
        if not self._closed:
            self._closed = True
            self._pool._close(self._shared, self._own, token_ids, self._scope)
            self._shared, self._own = [], []


class _Block:
    """A block whose content is known: `token_ids`, behind those of `parent` and the blocks above it."""

    __slots__ = ("_order", "children", "num_users", "number", "parent", "token_ids")

    def __init__(self, number: int, token_ids: tuple[int, ...], parent: _Block | None) -> None:
        self.number = number
        self.token_ids = token_ids
        self.parent = parent
        self.children: dict[tuple[int, ...], _Block] = {}
        self._order: list[tuple[int, ...]] = []  # of the children: what begins alike stands together
        self.num_users = 0

    def add(self, number: int, token_ids: tuple[int, ...]) -> _Block:
        """A new block under this one."""
        made = self.children[token_ids] = _Block(number, token_ids, self)
        bisect.insort(self._order, token_ids)
        return made

    def remove(self, child: _Block) -> None:
        """Take a block under this one away."""
        del self.children[child.token_ids]
        del self._order[bisect.bisect_left(self._order, child.token_ids)]

    def nearest(self, token_ids: tuple[int, ...]) -> tuple[_Block | None, int]:
        """The block under this one that begins with most of `token_ids`, and with how many of them."""
        at = bisect.bisect_left(self._order, token_ids)
        most, key = max(
            ((num_common_tokens(k, token_ids), k) for k in self._order[max(at - 1, 0) : at + 1]), default=(0, ())
        )
        return (self.children[key], most) if most else (None, 0)


class _Root(_Block):
    """What the texts of a scope begin under."""

    __slots__ = ("scope",)

    def __init__(self, scope: bytes) -> None:
        super().__init__(-1, (), None)
        self.scope = scope


_STRETCH = 64


def num_common_tokens(some: Seq[int], others: Seq[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    length, begin = min(len(some), len(others)), 0
    while begin < length and some[begin : begin + _STRETCH] == others[begin : begin + _STRETCH]:
        begin += _STRETCH
    end = min(begin + _STRETCH, length)
    return next((i for i in range(begin, end) if some[i] != others[i]), end)
