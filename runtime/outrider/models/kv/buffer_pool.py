"""The prefix cache of backends where each sequence has one contiguous buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.types import num_common_tokens

B = TypeVar("B")


@dataclass(eq=False, slots=True)
class Buffer(Generic[B]):
    """Memory for `capacity` tokens, `num_taken` of them in use. token_ids: those published in it."""

    memory: B
    capacity: int
    num_taken: int
    token_ids: list[int]
    scope: bytes = b""


@dataclass(frozen=True, slots=True)
class Opening(Generic[B]):
    """How a sequence gets its buffer.

    capacity: tokens of the buffer. source: a buffer whose first `num_cached` tokens the sequence begins with. moves:
    the source leaves the pool. It becomes the sequence's buffer if its capacity is the same; otherwise its parts are
    moved to a new buffer one by one. Without `moves`, the tokens are copied.
    """

    capacity: int
    source: Buffer[B] | None = None
    num_cached: int = 0
    moves: bool = False


class BufferPool(Generic[B]):
    """Allocates buffers to sequences. Evicts buffers of ended texts when room is needed, least recently used first.

        pool = BufferPool(num_tokens=4096, num_parts=60)
        opening = pool.open(700, prompt_token_ids)    # None while others hold the room
        buffer = Buffer(memory, opening.capacity, opening.capacity, [])
        pool.add(buffer)
        pool.share(buffer, token_ids)                 # committed tokens: others may copy them
        pool.close(buffer)

    A text that is continued takes over its old buffer. If that is too small, a larger one is made part by part, so that
    only one part exists twice; room is made for that, too. A text that shares only a prefix with another gets a copy of
    that prefix.

    num_tokens: capacity for all buffers together. num_parts: equal parts of a buffer. copies: whether parts can be
    copied; if not, a text is only continued if its old buffer is large enough.
    """

    def __init__(self, num_tokens: int, num_parts: int = 1, *, copies: bool = True) -> None:
        self.num_tokens, self._num_parts, self._copies = num_tokens, num_parts, copies
        self._open: list[Buffer[B]] = []
        self._idle: list[Buffer[B]] = []  # the least recently used first
        self.num_evicted = 0  # tokens

    @property
    def num_used(self) -> int:
        """Tokens of room that running sequences hold."""
        return sum(buffer.capacity for buffer in self._open)

    @property
    def num_idle(self) -> int:
        """Tokens of room that ended texts take."""
        return sum(buffer.num_taken for buffer in self._idle)

    def open(self, capacity: int, token_ids: Sequence[int] = (), scope: bytes = b"") -> Opening[B] | None:
        """How to make a buffer for `capacity` tokens that begin with `token_ids`; None while others hold the room.

        The last of `token_ids` is never taken from the prefix cache, because its row is wanted. Scopes share nothing.
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
                self._idle.append(source)  # it was used just now
            else:
                source.token_ids = source.token_ids[: opening.num_cached]  # the rest will be overwritten
                if opening.capacity != source.capacity:
                    needed = self._while_moving(source, capacity)
        while self.num_used + self.num_idle + needed > self.num_tokens:
            self.num_evicted += self._idle.pop(0).num_taken
        return opening

    def find(self, token_ids: Sequence[int], scope: bytes = b"") -> tuple[Buffer[B] | None, int]:
        """The buffer with the longest common prefix, and its length. From any thread; out of date at once."""
        of_scope = [buffer for buffer in (*self._idle, *self._open) if buffer.scope == scope]
        text = list(token_ids)
        common = [(num_common_tokens(buffer.token_ids, text), buffer) for buffer in of_scope]
        num_cached, buffer = max(common, key=lambda pair: pair[0], default=(0, None))
        return (buffer, num_cached) if num_cached else (None, 0)

    def _from(self, text: list[int], scope: bytes, capacity: int, available: int) -> Opening[B]:
        """The buffer with the longest common prefix, and how to use it."""
        source, num_cached = self.find(text, scope)
        if source is None:
            return Opening(capacity)
        is_idle = source in self._idle
        goes_on = is_idle and num_cached == len(source.token_ids)
        if goes_on and capacity <= source.capacity <= min(2 * capacity, available):
            return Opening(source.capacity, source, num_cached, moves=True)
        if not self._copies:
            return Opening(capacity)
        # If the source would be evicted to make room for its copy, move it instead.
        if goes_on or (is_idle and capacity + source.num_taken > available):
            if self._while_moving(source, capacity) > available:
                return Opening(capacity)
            return Opening(capacity, source, num_cached, moves=True)
        return Opening(capacity, source, num_cached)

    def _while_moving(self, source: Buffer[B], capacity: int) -> int:
        return max(capacity, source.num_taken) - (-source.num_taken // self._num_parts)

    def add(self, buffer: Buffer[B]) -> None:
        """Take in a running sequence's buffer."""
        self._open.append(buffer)

    def share(self, buffer: Buffer[B], token_ids: list[int]) -> None:
        """Publish the committed tokens in a running sequence's buffer."""
        buffer.token_ids = token_ids

    def clear(self) -> None:
        """Drop the buffers of ended sequences."""
        self._idle.clear()

    def close(self, buffer: Buffer[B]) -> None:
        """End a sequence. Its buffer stays if it has published tokens that no other idle buffer has."""
        self._open.remove(buffer)
        if not buffer.token_ids:
            return
        of_scope = [idle for idle in self._idle if idle.scope == buffer.scope]
        same = [idle for idle in of_scope if idle.token_ids[: len(buffer.token_ids)] == buffer.token_ids]
        if same:
            self._idle.remove(same[-1])
        self._idle.append(same[-1] if same else buffer)
