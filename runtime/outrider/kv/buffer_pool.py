"""The room of a cache in which each sequence has a buffer of its own, and the buffers of texts that have ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from outrider.kv.block_pool import num_common_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

B = TypeVar("B")


@dataclass(eq=False, slots=True)
class Buffer(Generic[B]):
    """Memory with room for `capacity` tokens, of which it takes that of `num_taken`. `token_ids` are kept in it."""

    memory: B
    capacity: int
    num_taken: int
    token_ids: list[int]
    scope: bytes = b""


@dataclass(frozen=True, slots=True)
class Opening(Generic[B]):
    """How a sequence gets its buffer.

    capacity: tokens that it has to have room for. source: whose first `num_cached` tokens are its own. moves: whether
    nobody else has the source any more: then it is the buffer, where its capacity is the same, or else is emptied into
    a new one, part by part.
    """

    capacity: int
    source: Buffer[B] | None = None
    num_cached: int = 0
    moves: bool = False


class BufferPool(Generic[B]):
    """Gives room to sequences, and gives up texts that have ended, the least recently used first, when it is needed.

        pool = BufferPool(num_tokens=4096, num_parts=60)
        opening = pool.open(700, prompt_token_ids)    # None while others hold the room
        buffer = Buffer(memory, opening.capacity, opening.capacity, [])
        pool.add(buffer)
        pool.share(buffer, token_ids)                 # committed: others may copy them
        pool.close(buffer)

    A text that goes on takes over the buffer that it stopped in. Where that is too small, a larger one is made, part by
    part, so that one part alone is there twice; room is made for that, too. A text that parts from another one gets a
    copy of what they have in common.

    num_tokens: room for all together. num_parts: of a buffer, as large as each other. copies: whether parts can be
    copied; if not, a text is only taken up where its buffer is large enough.
    """

    def __init__(self, num_tokens: int, num_parts: int = 1, *, copies: bool = True) -> None:
        self.num_tokens, self._num_parts, self._copies = num_tokens, num_parts, copies
        self._open: list[Buffer[B]] = []
        self._idle: list[Buffer[B]] = []  # the least recently used first
        self.num_evicted = 0  # tokens

    @property
    def num_used(self) -> int:
        """Room that sequences under way hold, in tokens."""
        return sum(buffer.capacity for buffer in self._open)

    @property
    def num_idle(self) -> int:
        """Room that ended texts take."""
        return sum(buffer.num_taken for buffer in self._idle)

    def open(self, capacity: int, token_ids: Seq[int] = (), scope: bytes = b"") -> Opening[B] | None:
        """How to make a buffer for `capacity` tokens that begin with `token_ids`; None while others hold the room.

        At least the last of `token_ids` is left to be read: its row is wanted. Nothing is taken from another scope.
        """
        available = self.num_tokens - self.num_used
        if capacity > available:
            return None
        text = list(token_ids[: max(min(len(token_ids), capacity) - 1, 0)])
        opening = self._from(text, scope, capacity, available)
        source = opening.source
        needed = opening.capacity
        if source in self._idle:
            self._idle.remove(source)
            if not opening.moves:
                self._idle.append(source)  # it is in use
            else:
                source.token_ids = source.token_ids[: opening.num_cached]  # what is behind will be overwritten
                if opening.capacity != source.capacity:
                    needed = self._while_moving(source, capacity)
        while self.num_used + self.num_idle + needed > self.num_tokens:
            self.num_evicted += self._idle.pop(0).num_taken
        return opening

    def _from(self, text: list[int], scope: bytes, capacity: int, available: int) -> Opening[B]:
        """The best beginning that there is, and how to use it."""
        buffers = [buffer for buffer in (*self._idle, *self._open) if buffer.scope == scope]
        common = [(num_common_tokens(buffer.token_ids, text), buffer) for buffer in buffers]
        num_cached, source = max(common, key=lambda pair: pair[0], default=(0, None))
        if source is None or not num_cached:
            return Opening(capacity)
        is_idle = source in self._idle
        goes_on = is_idle and num_cached == len(source.token_ids)
        if goes_on and capacity <= source.capacity <= min(2 * capacity, available):
            return Opening(source.capacity, source, num_cached, moves=True)
        if not self._copies:
            return Opening(capacity)
        # What would have to go for the copy's room may as well be moved.
        if goes_on or (is_idle and capacity + source.num_taken > available):
            if self._while_moving(source, capacity) > available:
                return Opening(capacity)
            return Opening(capacity, source, num_cached, moves=True)
        return Opening(capacity, source, num_cached)

    def _while_moving(self, source: Buffer[B], capacity: int) -> int:
        return max(capacity, source.num_taken) - (-source.num_taken // self._num_parts)

    def add(self, buffer: Buffer[B]) -> None:
        """A sequence has its buffer."""
        self._open.append(buffer)

    def share(self, buffer: Buffer[B], token_ids: list[int]) -> None:
        """Tokens that are in an open buffer, and will not be taken back."""
        buffer.token_ids = token_ids

    def close(self, buffer: Buffer[B]) -> None:
        """A sequence has ended; its buffer stays if any tokens are kept in it, and are in no other."""
        self._open.remove(buffer)
        if not buffer.token_ids:
            return
        of_scope = [idle for idle in self._idle if idle.scope == buffer.scope]
        same = [idle for idle in of_scope if idle.token_ids[: len(buffer.token_ids)] == buffer.token_ids]
        if same:
            self._idle.remove(same[-1])
        self._idle.append(same[-1] if same else buffer)
