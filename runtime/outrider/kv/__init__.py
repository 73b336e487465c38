"""Where keys and values live, and which of them are kept for texts to come."""

from outrider.kv.block_pool import BlockPool, Place, num_common_tokens
from outrider.kv.memory import allocate_zeros
from outrider.kv.slot_tokens import PrefixCounts, SlotTokens

__all__ = ["BlockPool", "Place", "PrefixCounts", "SlotTokens", "allocate_zeros", "num_common_tokens"]
