"""The KV cache: blocks or buffers, the prefix cache, eviction."""

from outrider.kv.block_pool import BlockPool, BlockTable, num_common_tokens
from outrider.kv.buffer_pool import Buffer, BufferPool, Opening
from outrider.kv.memory import allocate_zeros
from outrider.kv.slot_tokens import PrefixCounts, SlotTokens, Unbranched

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
    "num_common_tokens",
]
