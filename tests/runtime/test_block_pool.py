"""Which sequences have which blocks, and what the blocks hold. Each token stands for its keys and values."""

import functools
import itertools
import weakref
from typing import Any

import numpy as np
import openvino as ov
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino import opset13 as ops

import outrider
from calls import rows_of_call
from outrider.models.backends import paged_cache
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.paged_tensors import HostTensor
from outrider.models.kv import BlockPool, BlockTable
from outrider.models.kv.block_tree import Block, Root
from outrider.types import Chunk, Prompt

SIZE, NUM_BLOCKS, GARBAGE = 3, 12, -7


class Text:
    """A text that is read and written in rounds, like a request, with wrong drafts, and padding after the end.

    In memory, tokens differ by scope.
    """

    def __init__(
        self, pool: BlockPool, memory: np.ndarray, prompt: list[int], room: int, table: BlockTable, scope: bytes
    ) -> None:
        self.memory, self.room, self.table, self.shift = memory, room, table, 10 * len(scope)
        self.token_ids = prompt[: table.num_cached]
        if table.copied_block is not None:
            memory[table.first_own_block] = memory[table.copied_block]
        self.pool = pool

    def read(self, token_ids: list[int], num_wrong: int) -> None:
        """Append tokens and a draft. The draft is trimmed, but stays in memory."""
        self.write(len(self.token_ids), [*token_ids, *[GARBAGE] * num_wrong][: self.room - len(self.token_ids)])
        self.token_ids += token_ids[: self.room - len(self.token_ids)]

    def write(self, at: int, values: list[int]) -> None:
        assert at >= self.table.num_shared
        for i, value in enumerate(values, at):
            self.memory[self.table.blocks[i // SIZE], i % SIZE] = value + self.shift

    @property
    def found(self) -> list[int]:
        """The tokens in its blocks."""
        positions = [(self.table.blocks[i // SIZE], i % SIZE) for i in range(len(self.token_ids))]
        return [int(self.memory[position]) - self.shift for position in positions]


def check(pool: BlockPool, texts: list[Text]) -> None:
    for text in texts:
        assert text.found == text.token_ids
        assert len(text.table.blocks) == -(-text.room // SIZE)
    own = [number for text in texts for number in text.table._own]
    shared = {block for text in texts for block in text.table._shared}
    users = [block for text in texts for block in text.table._shared]
    held = [*own, *(block.number for block in shared), *pool._free, *(block.number for block in pool._idle)]
    assert sorted(held) == list(range(pool.num_blocks))  # no block is lost or listed twice
    assert all(block.num_users == users.count(block) > 0 for block in shared)
    assert pool.num_used == len(own) + len(shared)
    above = [block for block in (*shared, *pool._idle) if not isinstance(block.parent, Root)]
    assert all(root.children for root in pool._roots.values())  # a scope leaves nothing behind
    order = {block: i for i, block in enumerate(pool._idle)}
    for block in above:
        assert block.parent is not None
        assert block.parent.children[block.token_ids] is block
        assert block.parent in shared or order[block.parent] > order[block]  # a text's first blocks are evicted last


ACTIONS = st.tuples(
    st.sampled_from(["open", "read", "keep", "close", "drop"]),
    st.integers(0, 5),
    st.lists(st.integers(0, 1), min_size=1, max_size=9),
    st.integers(0, 4),
    st.sampled_from([b"", b"", b"image"]),
)


@settings(max_examples=400)
@given(st.lists(ACTIONS, min_size=12, max_size=40), st.booleans())
def test_every_text_finds_its_own_tokens(actions: list[Any], grows: bool) -> None:
    """For texts that are opened, read, published and closed in any order."""
    memory = np.full((NUM_BLOCKS, SIZE), GARBAGE)
    sizes = [2 if grows else NUM_BLOCKS]
    pool = BlockPool(sizes[0], SIZE, max_blocks=NUM_BLOCKS, grow=sizes.append)
    texts: list[Text] = []
    for kind, which, token_ids, count, scope in actions:
        if kind == "open":
            room = len(token_ids) + count
            free = pool.num_free + pool.num_idle
            table = pool.open(room, token_ids, scope)
            if table is None:
                assert free < -(-room // SIZE)
            else:
                assert table.num_cached < len(token_ids)
                texts.append(Text(pool, memory, token_ids, room, table, scope))
        elif texts:
            text = texts[which % len(texts)]
            if kind == "read":
                text.read(token_ids, count)
            elif kind == "keep":
                text.table.publish(text.token_ids)
            else:
                texts.remove(text)
                text.table.close(text.token_ids if kind == "close" else ())
                text.table.close(text.token_ids)
        check(pool, texts)
    assert all(later >= min(2 * size, NUM_BLOCKS) for size, later in itertools.pairwise(sizes))
    for text in texts:
        text.table.close()
    assert pool.num_used == 0


def test_of_a_part_that_is_whole_all_is_taken_from_the_cache_or_none() -> None:
    pool = BlockPool(64, SIZE)
    text = [*range(20)]
    table = pool.open(20, text)
    assert table
    table.close(text[:13])
    for wholes, expected in (
        ([], 13), ([(4, 13)], 13), ([(4, 14)], 4), ([(13, 16)], 13), ([(2, 5), (7, 15)], 7), ([(0, 19)], 0),
    ):  # fmt: skip
        again = pool.open(20, text, wholes=wholes)
        assert again
        assert again.num_cached == expected
        again.close(text[:13])


TEXTS = st.lists(st.integers(0, 2), max_size=70) | st.integers(60, 140).map(lambda length: [1] * length)


@given(st.sets(TEXTS.map(tuple)), TEXTS)
def test_the_text_that_has_most_in_common_is_found(texts: set[tuple[int, ...]], asked: list[int]) -> None:
    root = Block(-1, (), None)
    for text in [*texts, (9,)]:
        root.add(0, text)
    root.remove(root.children[(9,)])
    beginnings = [tuple(asked[:n]) for n in range(len(asked) + 1)]
    most = max((sum(text[: len(each)] == each for each in beginnings) - 1 for text in texts), default=0)
    found, num_common = root.nearest(tuple(asked))
    assert num_common == most
    assert (found is None) == (not most)
    assert not found or list(found.token_ids[:most]) == asked[:most]


def test_a_cache_that_grows_stays_in_its_budget(openvino_bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are replaced one by one. All of them, with the one that is replaced, never exceed the budget."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    class Counted(HostTensor):
        def __init__(self, *given: Any) -> None:
            nonlocal most
            super().__init__(*given)
            alive.add(self)
            most = max(most, sum(tensor._bytes.nbytes for tensor in alive))

    main = openvino_bundle.manifest.main
    model = OpenVINOPaged(openvino_bundle.model_path(main), vocab_size=main.vocab_size)
    token_ids = np.random.default_rng(0).integers(0, 39, 1500).tolist()

    def rows(max_tokens: int) -> np.ndarray:
        model.allocate(max_tokens)
        found = []
        for text in (token_ids[:200], token_ids[:300], token_ids):
            slot = model.open(len(text) + 1, Prompt(text))
            assert slot
            while slot.length < len(text):
                rows = rows_of_call(model, Chunk(slot, text[slot.length : slot.length + 100], 1))
            found.append(rows[0])
            slot.publish(text)
            slot.close()
        assert model.cache.num_cached_tokens == 200 + 300
        return np.array(found)

    whole = rows(4096)
    monkeypatch.setattr(paged_cache, "HostTensor", Counted)
    made: list[Any] = []

    class Growing(paged_cache.PagedCache):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options, grows=True)
            made.append(self)

    monkeypatch.setattr("outrider.models.backends.openvino_paged.PagedCache", Growing)
    np.testing.assert_array_equal(rows(4096), whole)
    assert made[0]._pool.num_blocks < 4096 // model.block_size
    assert model.open(2000)  # to its full size
    assert made[0]._pool.num_blocks == made[0]._pool.max_blocks
    assert 0.85 < most / (4096 * model.bytes_per_token) <= 1


def test_a_device_that_fails_for_a_while_is_used_again(openvino_bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    main = openvino_bundle.manifest.main
    model = OpenVINOPaged(openvino_bundle.model_path(main), vocab_size=main.vocab_size)
    grown = functools.partial(paged_cache.PagedCache, grows=True)
    monkeypatch.setattr("outrider.models.backends.openvino_paged.PagedCache", grown)
    model.allocate(8192)
    fails_at: int | None = 2

    class Failing(HostTensor):
        def __init__(self, *given: Any) -> None:
            nonlocal fails_at
            if fails_at is not None:
                fails_at -= 1
                if fails_at < 0:
                    raise MemoryError
            super().__init__(*given)

        def copy_block(self, source: int, target: int) -> None:
            if fails_at is not None:
                raise RuntimeError("[GPU] CL_OUT_OF_RESOURCES")
            super().copy_block(source, target)

    monkeypatch.setattr(paged_cache, "HostTensor", Failing)
    with pytest.raises(outrider.DeviceError, match="no room for a cache"):
        model.open(6000)  # the first tensors have grown by now, and the others have not
    fails_at = None
    slot = model.open(600)
    assert slot
    model.submit([Chunk(slot, [1] * 40, num_rows=1)]).wait()
    slot.publish([1] * 40)
    slot.close()
    fails_at = 0
    with pytest.raises(outrider.DeviceError, match="cannot copy a block of its cache: .*OUT_OF_RESOURCES"):
        model.open(100, Prompt([1] * 39))
    assert model.cache.num_used_tokens == 0


@pytest.mark.parametrize("grows", [False, True])
def test_two_graphs_share_a_cache(openvino_bundle: Any, monkeypatch: pytest.MonkeyPatch, grows: bool) -> None:
    """Each graph reads the blocks that the other has written, also after the tensors have grown."""
    made = functools.partial(paged_cache.PagedCache, grows=grows)
    monkeypatch.setattr("outrider.models.backends.openvino_paged.PagedCache", made)
    main = openvino_bundle.manifest.main
    path = openvino_bundle.model_path(main)
    first, second = (OpenVINOPaged(path, vocab_size=main.vocab_size, precision="f32") for _ in range(2))
    first.allocate(8192)
    cache = first.paged_cache
    cache.bind(second._request)
    part = reader_of(cache, "value_cache.0")
    cache.bind(part)
    token_ids = np.random.default_rng(0).integers(0, 39, 70).tolist()
    for room in (100, 3000):
        num_blocks = cache._pool.num_blocks
        slot, whole = cache.open(room), cache.open(room)
        assert slot
        assert whole
        assert (cache._pool.num_blocks > num_blocks) == (grows and room == 3000)
        for request in (second._request, part):  # before it is called, because smaller tensors are freed
            shape = request.get_tensor("value_cache.0").get_shape()
            assert shape == first._request.get_tensor("value_cache.0").get_shape()
        first.submit([Chunk(slot, token_ids[:40], 0)]).wait()
        (row,) = rows_of_call(second, Chunk(slot, token_ids[40:60], 1))
        (last,) = rows_of_call(first, Chunk(slot, token_ids[60:], 1))
        rows = rows_of_call(first, Chunk(whole, token_ids, 11))
        np.testing.assert_allclose([row, last], rows[[0, 10]], atol=1e-4)
        part.infer()
        held = part.get_output_tensor(0).data[slot.blocks[0]]
        assert held.any()
        np.testing.assert_array_equal(held, part.get_tensor("value_cache.0").data[slot.blocks[0]])
        np.testing.assert_array_equal(held, first._request.get_tensor("value_cache.0").data[slot.blocks[0]])
        slot.close()
        whole.close()


def reader_of(cache: paged_cache.PagedCache, name: str, *, num_more: int = 0) -> ov.InferRequest:
    """A request of a graph that returns one of a cache's inputs. num_more: how much larger the input's last axis is."""
    port = cache._ports[name]
    blocks, *others, last = port.partial_shape
    shape = ov.PartialShape([blocks, *others, ov.Dimension(last.get_length() + num_more)])
    parameter = ops.parameter(shape, port.get_element_type())
    parameter.output(0).set_names({name})
    model = ov.Model([ops.result(ops.multiply(parameter, ops.constant(np.float32(1))))], [parameter])
    return ov.Core().compile_model(model, "CPU").create_infer_request()
