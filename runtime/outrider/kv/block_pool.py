"""The blocks that a model's KV cache is cut into."""

from __future__ import annotations


class BlockPool:
    """Hands out the blocks of one cache by number.

        pool = BlockPool(num_blocks=64, block_size=32)
        blocks = pool.take(num_tokens=100)    # 4 blocks, or None while others hold them
        pool.give_back(blocks)

    num_blocks: blocks in all. block_size: tokens a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # The last block in is the first out: a block that was used is in memory already.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def max_tokens(self) -> int:
        """Tokens that fit when nobody else holds a block."""
        return self.num_blocks * self.block_size

    def take(self, num_tokens: int) -> list[int] | None:
        """Blocks for `num_tokens`, or None when too few are free."""
        wanted = -(-num_tokens // self.block_size)
        if wanted > len(self._free):
            return None
        at = len(self._free) - wanted
        blocks = self._free[at:]
        del self._free[at:]
        return blocks[::-1]

    def give_back(self, blocks: list[int]) -> None:
        """Return blocks that `take` handed out."""
        self._free.extend(reversed(blocks))
