"""The KV cache: blocks or buffers, the prefix cache, eviction."""

from outrider.models.kv.block_pool import BlockPool, BlockTable
from outrider.models.kv.buffer_pool import Buffer, BufferPool, Opening
from outrider.models.kv.memory import allocate_zeros
from outrider.models.kv.slot_tokens import PrefixCounts, SlotTokens, Unbranched

__all__ = [
    "BlockPool",
    "BlockTable",
    "Buffer",
    "BufferPool",
    "Opening",
    "PrefixCounts",
    "SlotTokens",
    "Unbranched",
    "allocate_zeros",
]
