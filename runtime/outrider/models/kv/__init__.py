"""The KV cache: blocks or buffers, the prefix cache, eviction."""

from outrider.models.kv.block_pool import BlockPool, BlockTable
from outrider.models.kv.buffer_pool import Buffer, BufferPool, Opening
from outrider.models.kv.prefix_store import PREFIXES, Fetched, Prefixes, PrefixStore, StoredModel, check_contents
from outrider.models.kv.slot_tokens import PrefixCounts, SlotTokens, Unbranched
from outrider.models.kv.state_rows import (
    LAST,
    NUM_FIXED,
    ROWS_PER_SEQUENCE,
    SPARE_ROW,
    ZERO_ROW,
    SequenceRows,
    StateCall,
    StateRows,
)

__all__ = [
    "LAST", "NUM_FIXED", "PREFIXES", "ROWS_PER_SEQUENCE", "SPARE_ROW", "ZERO_ROW", "BlockPool", "BlockTable", "Buffer",
    "BufferPool", "Fetched", "Opening", "PrefixCounts", "PrefixStore", "Prefixes", "SequenceRows", "SlotTokens",
    "StateCall", "StateRows", "StoredModel", "Unbranched", "check_contents",
]  # fmt: skip
