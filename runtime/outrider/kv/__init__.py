"""Where keys and values live, and which of them are kept for texts to come."""

from outrider.kv.block_pool import BlockPool, BlockTable, num_common_tokens
from outrider.kv.buffer_pool import Buffer, BufferPool, Opening
from outrider.kv.memory import allocate_zeros
from outrider.kv.slot_tokens import PrefixCounts, SlotTokens

__all__ = [
    "BlockPool",
    "BlockTable",
    "Buffer",
    "BufferPool",
    "Opening",
    "PrefixCounts",
    "SlotTokens",
    "allocate_zeros",
    "num_common_tokens",
]
