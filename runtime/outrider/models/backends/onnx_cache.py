"""Keys and values of models in ONNX: one buffer per sequence, which the model reads and writes in place."""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from outrider.errors import DeviceError
from outrider.models.kv import Buffer, BufferPool, Opening, PrefixCounts, SlotTokens, check_contents
from outrider.system.memory import allocate_zeros
from outrider.types import NO_PROMPT, CacheUse, Prompt, prompt_keys


@dataclass(eq=False, slots=True)
class _Memory:
    """Keys and values of one text: for each layer and kind a part [1, kv_heads, capacity, head_size].

    The parts are bound to the model's inputs and outputs once, as past and as present. bindings: by the other outputs
    that are bound there. arrays: the parts as arrays on the host; None on other devices. num_written: positions that
    may have been written to.
    """

    bindings: dict[tuple[str, ...], Any]
    parts: list[Any]
    arrays: list[NDArray[Any] | None]
    num_written: int = 0


class BufferSlot(SlotTokens):
    """A sequence's keys and values, in a buffer of its own.

    The first `length` positions hold tokens. Later positions are never read. bind: makes an IO binding of parts.
    on_close: is told of what stays in the prefix cache.
    """

    def __init__(
        self,
        pool: BufferPool[_Memory],
        buffer: Buffer[_Memory],
        token_ids: Sequence[int],
        num_cached: int,
        counts: PrefixCounts | None,
        num_spare: int,
        bind: Callable[[list[Any]], Any],
        on_close: Callable[[Sequence[int], bytes], object] | None = None,
    ) -> None:
        super().__init__(token_ids, num_cached, counts)
        self._pool, self._num_spare, self._bind = pool, num_spare, bind
        self._open_buffer: Buffer[_Memory] | None = buffer
        self.on_close, self._num_cached = on_close, num_cached

    @property
    def _buffer(self) -> Buffer[_Memory]:
        if self._open_buffer is None:
            raise RuntimeError("the slot is closed")
        return self._open_buffer

    def binding(self, outputs: tuple[str, ...]) -> Any:
        """The IO binding for calls that bind these outputs, besides the cache. They stay bound."""
        memory = self._buffer.memory
        if outputs not in memory.bindings:
            memory.bindings[outputs] = self._bind(memory.parts)
        return memory.bindings[outputs]

    @property
    def arrays(self) -> list[NDArray[Any] | None]:
        """The parts on the host, [1, kv_heads, capacity, head_size]; None on other devices."""
        return self._buffer.memory.arrays

    def has_written(self, length: int) -> None:
        """Record how far a call may have written."""
        memory = self._buffer.memory
        memory.num_written = max(memory.num_written, length)

    def publish(self, token_ids: Sequence[int]) -> None:
        """Publish the buffer's part of `token_ids`, which are committed."""
        super().publish(token_ids)
        self._pool.share(self._buffer, self.published_token_ids)

    def close(self) -> None:
        """Release the buffer. Published tokens stay until they are evicted. Closing twice does no harm."""
        # A reference to the slot must not keep the memory alive: others may get it.
        buffer, self._open_buffer = self._open_buffer, None
        if buffer is not None:
            buffer.token_ids = self.published_token_ids
            buffer.num_taken = min(buffer.capacity, buffer.memory.num_written + self._num_spare)
            self._pool.close(buffer)
            on_close, self.on_close = self.on_close, None
            if on_close is not None and self.length > self._num_cached:
                on_close(self.published_token_ids, buffer.scope)


class BufferCache:
    """The KV cache of one model: the buffers of running sequences, and the prefix cache.

        cache = BufferCache(session, past_names, (kv_heads, head_size), np.float32, num_tokens=8192)
        slot = cache.open(700, prompt)    # None while other slots hold the room

    On the host, a buffer takes no memory before it is written to, so an idle one counts as far as it was written. On
    other devices it counts as a whole, and it is reused only if it is large enough, because nothing is copied there.

    memory: the execution provider's kind of memory, and the device's number. device: for messages.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        pasts: Sequence[str],
        shape: Sequence[int],
        kind: type[np.generic],
        num_tokens: int,
        *,
        memory: tuple[str, int] = ("cpu", 0),
        device: str = "CPU",
    ) -> None:
        self._session, self._pasts, self._kind, self._memory, self._device = session, pasts, kind, memory, device
        self._num_heads, self._head_size = shape
        self._on_host = memory[0] == "cpu"
        self._pool: BufferPool[_Memory] = BufferPool(num_tokens, len(pasts), copies=self._on_host)
        self._counts = PrefixCounts()
        self.on_publish: Callable[[Sequence[int], bytes], object] | None = None
        self.block_size, self.has_states = 1, False

    @property
    def max_tokens(self) -> int:
        """Capacity in tokens."""
        return self._pool.num_tokens

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token, over all layers."""
        return float(len(self._pasts) * self._num_heads * self._bytes_per_head)

    @property
    def _bytes_per_head(self) -> int:
        return self._head_size * np.dtype(self._kind).itemsize

    @property
    def use(self) -> CacheUse:
        """Prefix-cache occupancy and hit statistics."""
        return CacheUse(
            num_tokens=self._pool.num_tokens,
            bytes_per_token=self.bytes_per_token,
            num_used_tokens=self._pool.num_used,
            num_published_tokens=self._pool.num_idle,
            num_evicted_tokens=self._pool.num_evicted,
            **dataclasses.asdict(self._counts),
        )

    def open(self, num_tokens: int, prompt: Prompt = NO_PROMPT) -> BufferSlot | None:
        """A slot with room for `num_tokens`, which starts from the longest cached prefix of the prompt."""
        opening = self._pool.open(num_tokens, prompt.token_ids, prompt.scope)
        if opening is None:
            return None
        source, capacity = opening.source, opening.capacity
        if source is not None and opening.moves and source.capacity == capacity:
            buffer = source
        else:
            buffer = Buffer(self._make(opening), capacity, capacity, [], prompt.scope)
        self._pool.add(buffer)
        # Unwritten pages take no memory. The pages at each head's beginning and end count as written.
        num_spare = -(-2 * mmap.PAGESIZE // self._bytes_per_head) if self._on_host else capacity
        counts = self._counts if prompt.counted else None
        return BufferSlot(
            self._pool, buffer, prompt.token_ids, opening.num_cached, counts, num_spare, self._bind, self.on_publish
        )

    def clear(self) -> None:
        """Drop all cached prefixes that no slot uses."""
        self._pool.clear()

    def num_cached(self, keys: Sequence[int], scope: bytes) -> int:
        """As `Prefixes` says."""
        return self._pool.find(keys, scope)[1]

    def read(self, keys: Sequence[int], scope: bytes, begin: int) -> NDArray[np.uint8] | None:
        """As `Prefixes` says: for each layer and kind [kv_heads, tokens, head_size]."""
        buffer, num_common = self._pool.find(keys, scope)
        if buffer is None or num_common < len(keys):
            return None
        parts = [array[0, :, begin : len(keys)].ravel() for array in buffer.memory.arrays if array is not None]
        return np.concatenate(parts).view(np.uint8)

    def expect(self, keys: Sequence[int], scope: bytes) -> None:
        """As `Prefixes` says: there are none."""

    def state_ends(self, keys: Sequence[int], scope: bytes) -> list[int]:  # noqa: ARG002
        """As `Prefixes` says: none."""
        return []

    def read_state(self, keys: Sequence[int], scope: bytes) -> NDArray[np.uint8] | None:  # noqa: ARG002
        """As `Prefixes` says: none."""
        return None

    def restore(
        self,
        keys: Sequence[int],
        scope: bytes,
        contents: Sequence[tuple[int, NDArray[np.uint8]]],
        room: int,
        state: NDArray[np.uint8] | None = None,  # noqa: ARG002
    ) -> None:
        """As `Prefixes` says."""
        check_contents(contents, len(keys), self.block_size, int(self.bytes_per_token))
        if room < len(keys):
            raise ValueError(f"a text of {len(keys):,} tokens is to begin a sequence of {room:,}")
        slot = self.open(room, Prompt(keys, scope, counted=False))
        if slot is None:
            return
        slot.on_close = None
        try:
            if contents[0][0] > slot.length:  # some of it was evicted since
                return
            for begin, content in contents:
                # A part's content is [kv_heads, count, head_size]; the text may have fewer tokens than the file.
                parts = content.view(self._kind).reshape(len(self._pasts), self._num_heads, -1, self._head_size)
                end = min(begin + parts.shape[2], len(keys))
                for part, array in zip(parts, slot.arrays, strict=True):
                    if array is not None:
                        array[0, :, begin:end] = part[:, : end - begin]
            slot.has_written(len(keys))
            slot.record(keys[slot.length :])
            slot.publish(prompt_keys(keys))
        finally:
            slot.close()

    def _make(self, opening: Opening[_Memory]) -> _Memory:
        """Memory as `opening` says, with the cached prefix in it."""
        source = opening.source.memory if opening.source else None
        made = _Memory({}, [], [], opening.num_cached)
        if source and opening.moves:
            source.bindings.clear()  # they hold the parts
        try:
            for i in range(len(self._pasts)):
                array, part = self._make_part(opening.capacity)
                if source:
                    _copy(source.arrays[i], array, opening.num_cached)
                if source and opening.moves:
                    source.parts[i] = source.arrays[i] = None
                made.parts.append(part)
                made.arrays.append(array)
        except Exception as error:
            size = opening.capacity * self.bytes_per_token / 1e9
            raise DeviceError(
                f"{self._device} has no room for a cache of {opening.capacity:,} tokens ({size:.2f} GB). "
                "Lower max_new_tokens or cache_size."
            ) from error
        return made

    def _bind(self, parts: list[Any]) -> Any:
        binding = self._session.io_binding()
        for name, part in zip(self._pasts, parts, strict=True):
            binding.bind_ortvalue_input(name, part)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), part)
        return binding

    def _make_part(self, capacity: int) -> tuple[NDArray[Any] | None, Any]:
        shape = [1, self._num_heads, capacity, self._head_size]
        if not self._on_host:
            return None, ort.OrtValue.ortvalue_from_shape_and_type(shape, self._kind, *self._memory)
        array = allocate_zeros(math.prod(shape) * np.dtype(self._kind).itemsize).view(self._kind).reshape(shape)
        return array, ort.OrtValue.ortvalue_from_numpy(array)


def _copy(source: NDArray[Any] | None, target: NDArray[Any] | None, num_tokens: int) -> None:
    """Copy the first tokens of one part to another, both on the host."""
    if source is not None and target is not None:
        target[:, :, :num_tokens] = source[:, :, :num_tokens]
