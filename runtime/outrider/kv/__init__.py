"""Where keys and values live."""

from outrider.kv.block_pool import BlockPool

__all__ = ["BlockPool"]
