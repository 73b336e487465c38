"""The KV cache of a model with paged attention: its tensors, and the slots with their blocks.

GPU: written against the documented interface and openvino-genai's cache manager; not verified on hardware.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from outrider.errors import DeviceError, one_line
from outrider.models.backends.paged_tensors import DeviceTensor, HostTensor, bytes_of
from outrider.models.kv import BlockPool, BlockTable, PrefixCounts, SlotTokens, check_contents
from outrider.types import NO_PROMPT, CacheUse, Prompt, embed_keys, prompt_keys

_FIRST_BLOCKS = 16  # of a cache that grows
SCRATCH = np.zeros(1, dtype=np.int32)  # the block that padding is written to; it belongs to no slot
_NUM_SCRATCH = len(SCRATCH)


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
    context: of the device; None for the host. grows: whether the cache grows; by default on devices only.

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
    ) -> None:
        self._ports, self._device, self._context = ports, device, context
        self._requests: list[tuple[ov.InferRequest, frozenset[str]]] = []  # with the cache inputs that each has
        self._tensors: dict[str, HostTensor | DeviceTensor] = {}
        grows = context is not None if grows is None else grows
        # A tensor that is replaced exists twice, in its old and its new size.
        most = max(num_blocks * len(ports) // (len(ports) + 1), 1) if grows else num_blocks
        first = min(_FIRST_BLOCKS, most) if grows else most
        self.grows = grows
        self._resize(first)
        # A weak reference: in a circle, the weights of a closed engine would wait for the garbage collector.
        grow = partial(PagedCache._resize, weakref.proxy(self))
        self._pool = BlockPool(first, block_size, max_blocks=most, grow=grow)
        self.block_size = block_size
        self._counts = PrefixCounts()
        self.on_publish: Callable[[Seq[int], bytes], object] | None = None

    def bind(self, request: ov.InferRequest) -> None:
        """Bind a request to these tensors, and to larger ones when the cache grows.

        Its graph has some or all of the cache's inputs, by the same names. Not during a call.

        Raises:
            DeviceError: when it has none of them, or one of another type or shape.
        """
        found = {name: port for port in request.model_inputs for name in port.get_names() if name in self._ports}
        for name, port in found.items():
            ours, asked = (f"{each.get_element_type()} {each.partial_shape}" for each in (self._ports[name], port))
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
            **dataclasses.asdict(self._counts),
        )

    def open(self, num_tokens: int, prompt: Prompt = NO_PROMPT) -> PagedSlot | None:
        """A slot with room for `num_tokens`, which starts from the longest cached prefix of the prompt."""
        prompt = dataclasses.replace(prompt, token_ids=embed_keys(prompt.token_ids, prompt.embeds))
        table = self._pool.open(num_tokens, prompt.token_ids, prompt.scope)
        if table is None:
            return None
        if table.copied_block is not None:
            try:
                self.copy_block(table.copied_block + _NUM_SCRATCH, table.first_own_block + _NUM_SCRATCH)
            except DeviceError:
                table.close()
                raise
        return PagedSlot(self, table, prompt, self._counts if prompt.counted else None)

    def num_cached(self, keys: Seq[int], scope: bytes) -> int:
        """As `Prefixes` says."""
        return self._pool.num_cached(keys, scope)

    def read(self, keys: Seq[int], scope: bytes, begin: int) -> NDArray[np.uint8] | None:
        """As `Prefixes` says: for each tensor the blocks from `begin` on, one after the other."""
        numbers = self._pool.blocks_of(keys, scope)
        if numbers is None:
            return None
        wanted = np.array(numbers[begin // self.block_size :]) + _NUM_SCRATCH
        return np.concatenate([tensor.read(wanted) for tensor in self._tensors.values()])

    def restore(self, keys: Seq[int], scope: bytes, contents: Seq[tuple[int, NDArray[np.uint8]]], room: int) -> None:  # noqa: ARG002
        """As `Prefixes` says. Not during a call."""
        size = sum(bytes_of(port, 1) for port in self._ports.values())
        check_contents(contents, len(keys), self.block_size, size)
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
            slot.append(keys[slot.length :])
            slot.publish(prompt_keys(keys))
        finally:
            slot.close()

    def clear(self) -> None:
        """Drop all cached prefixes that no slot uses."""
        self._pool.clear()

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block of all layers to one that is not published. Not during a call.

        Raises:
            DeviceError: when the device cannot.
        """
        self._pool.check_unpublished(target - _NUM_SCRATCH)
        try:
            for tensor in self._tensors.values():
                tensor.copy_block(source, target)
        except RuntimeError as error:
            raise DeviceError(f"{self._device} cannot copy a block of its cache: {one_line(error)}.") from error

    def _resize(self, num_blocks: int) -> None:
        """Allocate the tensors, or replace them by larger ones. Not during a call."""
        for name in self._ports:
            self._replace(name, num_blocks + _NUM_SCRATCH)

    def _replace(self, name: str, num_blocks: int) -> None:
        port, old = self._ports[name], self._tensors.get(name)
        if old is not None and old.tensor.get_shape()[0] >= num_blocks:
            return  # it grew before, when there was no room for the others
        try:
            context = self._context
            made = HostTensor(port, num_blocks) if context is None else DeviceTensor.on(context, port, num_blocks)
            if old is not None:
                made.begin_with(old)
        except (RuntimeError, MemoryError, OSError, OverflowError, TypeError, ValueError) as error:
            size = sum(bytes_of(each, num_blocks) for each in self._ports.values())
            raise DeviceError(
                f"{self._device} has no room for a cache of {size / 1e9:.2f} GB. Lower cache_size."
            ) from error
        for request, names in self._requests:
            if name in names:
                request.set_tensor(name, made.tensor)
        self._tensors[name] = made


class PagedSlot(SlotTokens):
    """A sequence's blocks in the cache. `length` tokens of them hold keys and values.

    A branch of a tree has the sequence's blocks up to the last, unfinished one, a copy of that, and blocks of its own
    behind it. So its rows are calculated as those of any other sequence.

    branch_blocks: the blocks of each branch beside the first. on_close: is told of what stays in the prefix cache.
    adapter, embeds: of its prompt. most_rows: of a call; 0: any number.
    """

    most_rows = 0

    def __init__(self, cache: PagedCache, table: BlockTable, prompt: Prompt, counts: PrefixCounts | None) -> None:
        super().__init__(prompt.token_ids, table.num_cached, counts)
        self.adapter, self.embeds, self._scope = prompt.adapter, prompt.embeds, prompt.scope
        self.on_close, self._num_cached = cache.on_publish, table.num_cached
        self._cache, self._table = cache, table
        self.blocks = _numbers(table)
        self.branch_blocks: list[NDArray[np.int32]] = []
        self._taken: list[list[int]] = []  # of each branch
        self._forked_at = self._num_skipped = 0
        self._tree: tuple[list[list[int]], list[int]] = [], []  # the last call's branches and tokens

    def append(self, token_ids: Seq[int]) -> None:
        """Record the tokens that a call writes."""
        super().append(embed_keys(token_ids, self.embeds, self.length))

    def check_writable(self) -> None:
        """Raise AssertionError if the next token would be written to a shared block."""
        self._table.check_writable(self.length)

    def discard(self, begin: int, *, whole_blocks: bool) -> None:
        """Drop what a failed call may have written: all from token `begin` on, or from the beginning of its block."""
        self._join()
        kept = begin - begin % self._cache.block_size if whole_blocks else begin
        super().trim(max(kept, self._table.num_shared))

    def skip_to(self, length: int) -> None:
        """Pretend that the slot holds `length` tokens; see `BenchmarkSlot`.

        Their blocks are written once. Pages that never were are one page of zeros, which is read much faster.
        """
        super().skip_to(length)
        for block in self.blocks[self._num_skipped : -(-length // self._cache.block_size)]:
            self._cache.copy_block(0, block)
            self._num_skipped += 1

    def fork(self, count: int, length: int) -> int:
        """Take room for up to `count` branches of up to `length` tokens. Not during a call.

        There is none if one call could not read all of them beside the first one.
        """
        if self.most_rows and (count + 1) * length > self.most_rows:
            return 0
        self._join()
        begin, size = self.length, self._cache.block_size
        first, end = begin // size, -(-(begin + length) // size)
        for _ in range(count):
            numbers = self._table.take(end - first)
            if numbers is None:
                break
            blocks = self.blocks.copy()
            blocks[first:end] = np.array(numbers, dtype=np.int32) + np.int32(_NUM_SCRATCH)
            if begin % size:
                self._cache.copy_block(int(self.blocks[first]), int(blocks[first]))
            self._taken.append(numbers)
            self.branch_blocks.append(blocks)
        self._forked_at = begin
        return len(self._taken)

    def append_tree(self, branches: list[list[int]], token_ids: Seq[int]) -> None:
        """Record the tokens of a call's tree. The slot holds its first branch."""
        self._tree = branches, [*token_ids]
        self.append([token_ids[i] for i in branches[0]])

    def keep(self, path: Seq[int]) -> None:
        """Of the last call's tree keep these tokens. Their blocks become the sequence's."""
        branches, token_ids = self._tree
        at = next(i for i, branch in enumerate(branches) if branch[: len(path)] == [*path])
        if at:
            self._taken[at - 1] = self._table.exchange(self._forked_at // self._cache.block_size, self._taken[at - 1])
            self.blocks = _numbers(self._table)
        super().trim(self._forked_at)
        self.append([token_ids[i] for i in path])
        self._join()

    def _join(self) -> None:
        """Give back the branches' blocks."""
        for numbers in self._taken:
            self._table.give(numbers)
        self._taken, self.branch_blocks = [], []

    def trim(self, length: int) -> None:
        """Drop the newest tokens until `length` are left. Their keys and values are overwritten next.

        Raises:
            ValueError: when that would trim published tokens, which other slots may share.
        """
        if length < min(self._table.num_shared, self.length):
            raise ValueError(f"{self._table.num_shared} tokens of this slot are shared: it cannot go back to {length}.")
        super().trim(length)

    def publish(self, token_ids: Seq[int]) -> None:
        """Publish the slot's part of `token_ids`, which are committed. Not during a call."""
        super().publish(embed_keys(token_ids, self.embeds))
        self._table.publish(self.published_token_ids)
        self.blocks = _numbers(self._table)

    @property
    def num_shared(self) -> int:
        """Tokens in shared blocks, which are never written."""
        return self._table.num_shared

    def close(self) -> None:
        """Free the blocks. Published ones stay until they are evicted. Closing twice does no harm."""
        self._join()
        self._table.close(self.published_token_ids)
        on_close, self.on_close = self.on_close, None
        if on_close is not None and self.length > self._num_cached:
            on_close(self.published_token_ids, self._scope)


def _numbers(table: BlockTable) -> NDArray[np.int32]:
    """The tensors' blocks of a sequence, in the order of the text."""
    return np.array(table.blocks, dtype=np.int32) + np.int32(_NUM_SCRATCH)


def blocks_to_allocate(num_blocks: int, num_tensors: int, *, grows: bool) -> int:
    """The `num_blocks` for a `PagedCache` that is to hold so many blocks."""
    return -(-num_blocks * (num_tensors + 1) // num_tensors) if grows else num_blocks
