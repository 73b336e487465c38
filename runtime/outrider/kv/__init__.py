"""Where keys and values live, and which of them are kept for texts to come."""

from outrider.kv.block_pool import BlockPool, Place, num_common_tokens
from outrider.kv.buffer_pool import Buffer, BufferPool, Opening
from outrider.kv.memory import allocate_zeros
from outrider.kv.slot_tokens import PrefixCounts, SlotTokens

__all__ = [
    "BlockPool",
    "Buffer",
    "BufferPool",
    "Opening",
    "Place",
    "PrefixCounts",
    "SlotTokens",
    "allocate_zeros",
    "num_common_tokens",
]
