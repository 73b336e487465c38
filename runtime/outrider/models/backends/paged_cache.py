"""The cache of a model with paged attention: tensors with blocks of keys and values, and with rows of states.

GPU: written against the documented interface and openvino-genai's cache manager; not verified on hardware.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from outrider.errors import DeviceError, one_line
from outrider.models.backends.paged_slot import NUM_SCRATCH, PagedSlot
from outrider.models.backends.paged_tensors import DeviceTensor, HostTensor, bytes_of
from outrider.models.kv import SPARE_ROW, BlockPool, PrefixCounts, StateCall, StateRows, check_contents
from outrider.types import NO_PROMPT, CacheUse, Prompt, embed_keys, prompt_keys

_FIRST_BLOCKS = 16  # of a cache that grows


class PagedCache:
    """Keys and values in blocks, one tensor per layer and kind, for the inference requests that are bound to it.

        cache = PagedCache(ports, num_blocks=256, block_size=32, device="CPU")
        cache.bind(request)
        slot = cache.open(200, prompt)    # None while other slots hold the room

    Requests of several graphs on one device can be bound. They share the cache's content. Their calls must not overlap.

    On the host the whole cache is allocated at once, because unwritten pages take no memory. On a device, allocated
    memory is taken at once. So the cache starts small there and grows tensor by tensor. Only one tensor then exists
    twice, and room for that is left.

    ports: the compiled model's inputs for the cache, by name. num_blocks: what fits in the budget, besides `SCRATCH`.
    context: of the device; None for the host. grows: whether the cache grows; by default on devices only. state_ports:
    the inputs for tables of states, if there are any, which have `num_rows` rows from the start.

    Raises:
        DeviceError: when there is no room for it.
    """

    def __init__(
        self,
        ports: Mapping[str, ov.ConstOutput],
        num_blocks: int,
        block_size: int,
        *,
        device: str,
        context: ov.RemoteContext | None = None,
        grows: bool | None = None,
        state_ports: Mapping[str, ov.ConstOutput] | None = None,
        num_rows: int = 0,
    ) -> None:
        self._ports, self._device, self._context = ports, device, context
        self._state_ports = state_ports or {}
        self._requests: list[tuple[ov.InferRequest, frozenset[str]]] = []  # with the cache inputs that each has
        self._tensors: dict[str, HostTensor | DeviceTensor] = {}
        grows = context is not None if grows is None else grows
        # A tensor that is replaced exists twice, in its old and its new size.
        most = max(num_blocks * len(ports) // (len(ports) + 1), 1) if grows else num_blocks
        first = min(_FIRST_BLOCKS, most) if grows else most
        self.grows = grows
        self._resize(first)
        self._rows: StateRows | None = None
        if self._state_ports:
            self._rows = StateRows(num_rows, spacing=tokens_per_row(ports, self._state_ports, block_size))
            for name in self._state_ports:
                self._replace(name, num_rows)
        # A weak reference: in a circle, the weights of a closed engine would wait for the garbage collector.
        grow = partial(PagedCache._resize, weakref.proxy(self))
        self._pool = BlockPool(first, block_size, max_blocks=most, grow=grow, rows=self._rows)
        self.block_size = block_size
        self._counts = PrefixCounts()
        self.on_publish: Callable[[Sequence[int], bytes], object] | None = None

    def bind(self, request: ov.InferRequest) -> None:
        """Bind a request to these tensors, and to larger ones when the cache grows.

        Its graph has some or all of the cache's inputs, by the same names. Not during a call.

        Raises:
            DeviceError: when it has none of them, or one of another type or shape.
        """
        known = {**self._ports, **self._state_ports}
        found = {name: port for port in request.model_inputs for name in port.get_names() if name in known}
        for name, port in found.items():
            ours, asked = (f"{each.get_element_type()} {each.partial_shape}" for each in (known[name], port))
            if asked != ours:
                raise DeviceError(
                    f"{self._device} has {name} as {ours} in the cache, and a graph that is to share it as {asked}. "
                    "Compile both with the same cache_precision."
                )
        if not found and self._ports:
            raise DeviceError(
                f"A graph that is to share a cache on {self._device} has none of its inputs. Export it again."
            )
        for name in found:
            request.set_tensor(name, self._tensors[name].tensor)
        self._requests.append((request, frozenset(found)))

    @property
    def max_tokens(self) -> int:
        """Capacity in tokens, once the cache has grown."""
        return self._pool.max_tokens

    @property
    def use(self) -> CacheUse:
        """Prefix-cache occupancy and hit statistics."""
        size = self._pool.block_size
        return CacheUse(
            num_tokens=self.max_tokens,
            bytes_per_token=sum(bytes_of(port, 1) for port in self._ports.values()) / size,
            num_used_tokens=self._pool.num_used * size,
            num_published_tokens=self._pool.num_idle * size,
            num_evicted_tokens=self._pool.num_evicted * size,
            **self._use_of_rows(),
            **dataclasses.asdict(self._counts),
        )

    @property
    def _bytes_per_row(self) -> int:
        return sum(bytes_of(port, 1) for port in self._state_ports.values())

    def _use_of_rows(self) -> dict[str, int]:
        rows = self._rows
        if rows is None:
            return {}
        return {
            "num_rows": rows.capacity,
            "bytes_per_row": self._bytes_per_row,
            "num_used_rows": rows.num_used,
            "num_published_rows": rows.num_idle,
            "num_evicted_rows": rows.num_evicted,
        }

    @contextlib.contextmanager
    def spare_rows(self, calls: Sequence[StateCall]) -> Iterator[Callable[[], int]]:
        """Yield a function that gives rows to which the padding of a call with these calls of states writes.

        Raises:
            AssertionError: when the calls would read or write rows that they must not.
        """
        rows = self._rows
        if rows is None:
            yield lambda: SPARE_ROW
            return
        rows.check(calls)
        taken: list[int] = []

        def take() -> int:
            taken.append(SPARE_ROW if not taken else rows.take_spare())
            return taken[-1]

        yield take
        for row in taken[1:]:  # it is written once in this call, and nobody reads it
            rows.drop(row)

    def open(self, num_tokens: int, prompt: Prompt = NO_PROMPT) -> PagedSlot | None:
        """A slot with room for `num_tokens`, which starts from the longest cached prefix of the prompt."""
        prompt = dataclasses.replace(prompt, token_ids=embed_keys(prompt.token_ids, prompt.embeds))
        wholes = [(span.begin, span.end) for span in prompt.embeds if span.whole]
        table = self._pool.open(num_tokens, prompt.token_ids, prompt.scope, wholes)
        if table is None:
            return None
        if table.copied_block is not None:
            try:
                self.copy_block(table.copied_block + NUM_SCRATCH, table.first_own_block + NUM_SCRATCH)
            except DeviceError:
                table.close()
                raise
        return PagedSlot(self, table, prompt, self._counts if prompt.counted else None)

    def num_cached(self, keys: Sequence[int], scope: bytes) -> int:
        """As `Prefixes` says."""
        return self._pool.num_cached(keys, scope)

    def read(self, keys: Sequence[int], scope: bytes, begin: int) -> NDArray[np.uint8] | None:
        """As `Prefixes` says: for each tensor the blocks from `begin` on, one after the other."""
        numbers = self._pool.blocks_of(keys, scope)
        if numbers is None:
            return None
        wanted = np.array(numbers[begin // self.block_size :]) + NUM_SCRATCH
        return np.concatenate([self._tensors[name].read(wanted) for name in self._ports])

    @property
    def has_states(self) -> bool:
        """As `Prefixes` says."""
        return self._rows is not None

    def expect(self, keys: Sequence[int], scope: bytes) -> None:
        """As `Prefixes` says."""
        self._pool.expected = scope, tuple(keys)

    def state_ends(self, keys: Sequence[int], scope: bytes) -> list[int]:
        """As `Prefixes` says."""
        return [] if self._rows is None else self._pool.row_ends(keys, scope)

    def read_state(self, keys: Sequence[int], scope: bytes) -> NDArray[np.uint8] | None:
        """As `Prefixes` says: its row of each table, one after the other."""
        length, row = self._pool.last_row(keys, scope)
        if self._rows is None or length < len(keys):
            return None
        return np.concatenate([self._tensors[name].read(np.array([row])) for name in self._state_ports])

    def restore(
        self,
        keys: Sequence[int],
        scope: bytes,
        contents: Sequence[tuple[int, NDArray[np.uint8]]],
        room: int,  # noqa: ARG002
        state: NDArray[np.uint8] | None = None,
    ) -> None:
        """As `Prefixes` says. Not during a call."""
        size = sum(bytes_of(port, 1) for port in self._ports.values())
        check_contents(contents, len(keys), self.block_size, size)
        if (0 if state is None else len(state)) != self._bytes_per_row:
            given = "none" if state is None else f"{len(state):,} bytes"
            raise ValueError(f"the states after {len(keys):,} tokens are {given}, of {self._bytes_per_row:,} bytes")
        slot = self.open(len(keys), dataclasses.replace(NO_PROMPT, token_ids=keys, scope=scope, counted=False))
        if slot is None:
            return
        slot.on_close = None
        try:
            first = slot.num_shared // self.block_size  # of the blocks that may be written
            if contents[0][0] > slot.num_shared:  # some of it was evicted since
                return
            for begin, content in contents:
                at = begin // self.block_size
                numbers = slot.blocks[max(at, first) : at + len(content) // size]
                skipped, offset = max(first - at, 0), 0
                for name, port in self._ports.items():
                    each = bytes_of(port, 1)
                    part = content[offset : offset + len(content) // size * each].reshape(-1, each)
                    offset += part.size
                    if len(numbers):
                        self._tensors[name].write(numbers, part[skipped : skipped + len(numbers)])
            if state is not None and slot.length < len(keys):
                self._write_row(slot.take_row(len(keys)), state)
            slot.record(keys[slot.length :])
            slot.publish(prompt_keys(keys))
        finally:
            slot.close()

    def _write_row(self, row: int, content: NDArray[np.uint8]) -> None:
        offset = 0
        for name, port in self._state_ports.items():
            size = bytes_of(port, 1)
            self._tensors[name].write(np.array([row], np.int32), content[offset : offset + size].reshape(1, -1))
            offset += size

    def clear(self) -> None:
        """Drop all cached prefixes that no slot uses."""
        self._pool.clear()

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block of all layers to one that is not published. Not during a call.

        Raises:
            DeviceError: when the device cannot.
        """
        self._pool.check_unpublished(target - NUM_SCRATCH)
        try:
            for name in self._ports:
                self._tensors[name].copy_block(source, target)
        except RuntimeError as error:
            raise DeviceError(f"{self._device} cannot copy a block of its cache: {one_line(error)}.") from error

    def _resize(self, num_blocks: int) -> None:
        """Allocate the tensors, or replace them by larger ones. Not during a call."""
        for name in self._ports:
            self._replace(name, num_blocks + NUM_SCRATCH)

    def _replace(self, name: str, num_blocks: int) -> None:
        port, old = self._ports.get(name) or self._state_ports[name], self._tensors.get(name)
        if old is not None and old.tensor.get_shape()[0] >= num_blocks:
            return  # it grew before, when there was no room for the others
        try:
            context = self._context
            made = HostTensor(port, num_blocks) if context is None else DeviceTensor.on(context, port, num_blocks)
            if old is not None:
                made.begin_with(old)
            elif context is not None and name in self._state_ports:  # a device's memory has any content
                made.write(np.zeros(1, np.int32), np.zeros((1, bytes_of(port, 1)), np.uint8))
        except (RuntimeError, MemoryError, OSError, OverflowError, TypeError, ValueError) as error:
            ports = self._ports if name in self._ports else self._state_ports
            size = sum(bytes_of(each, num_blocks) for each in ports.values())
            raise DeviceError(
                f"{self._device} has no room for a cache of {size / 1e9:.2f} GB. Lower cache_size."
            ) from error
        for request, names in self._requests:
            if name in names:
                request.set_tensor(name, made.tensor)
        self._tensors[name] = made


def blocks_to_allocate(num_blocks: int, num_tensors: int, *, grows: bool) -> int:
    """The `num_blocks` for a `PagedCache` that is to hold so many blocks."""
    return -(-num_blocks * (num_tensors + 1) // num_tensors) if grows else num_blocks


def tokens_per_row(
    ports: Mapping[str, ov.ConstOutput], state_ports: Mapping[str, ov.ConstOutput], block_size: int
) -> int:
    """Tokens of the cache for each row of states: so many that rows take no more memory than keys and values do."""
    of_token = sum(bytes_of(port, 1) for port in ports.values()) / block_size
    of_row = sum(bytes_of(port, 1) for port in state_ports.values())
    return max(block_size, -(-of_row // max(int(of_token), 1)))
