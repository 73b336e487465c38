"""Room and buffers, one per text. Each token stands for its keys and values."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.models.kv import Buffer, BufferPool

ROOM, NUM_PARTS = 24, 2


class Text:
    """A text in a buffer of two parts, made as a backend makes it."""

    def __init__(self, pool: BufferPool[Any], capacity: int, prompt: list[int], scope: bytes = b"") -> None:
        opening = pool.open(capacity, prompt, scope)
        if opening is None:
            raise LookupError
        self.pool, self.most = pool, 0.0
        source = opening.source
        if source is not None and opening.moves and source.capacity == opening.capacity:
            self.buffer = source
        else:
            others = pool.num_used + pool.num_idle
            old = [source.num_taken / NUM_PARTS if source and opening.moves else 0] * NUM_PARTS
            parts: list[list[int]] = []
            for i in range(NUM_PARTS):
                parts.append(source.memory[i][: opening.num_cached] if source else [])
                self.most = max(self.most, others + len(parts) * opening.capacity / NUM_PARTS + sum(old))
                old[i] = 0
            self.buffer = Buffer(parts, opening.capacity, opening.capacity, [], scope)
        pool.add(self.buffer)
        self.token_ids = prompt[: opening.num_cached]

    def close(self, kept: list[int]) -> None:
        self.buffer.token_ids = kept
        self.buffer.num_taken = min(self.buffer.capacity, len(self.token_ids) + 2)
        self.pool.close(self.buffer)


ACTIONS = st.tuples(
    st.sampled_from(["open", "open", "read", "keep", "close", "drop"]),
    st.integers(0, 5),
    st.lists(st.integers(0, 1), min_size=1, max_size=9),
    st.integers(0, 6),
    st.sampled_from([b"", b"", b"image"]),
)


def as_read(buffer: Buffer[Any], token_ids: list[int]) -> list[int]:
    """What memory holds after these tokens were read. It differs by scope."""
    return [token_id + 10 * len(buffer.scope) for token_id in token_ids]


@settings(max_examples=400)
@given(st.lists(ACTIONS, min_size=12, max_size=40), st.booleans())
def test_room_is_never_overdrawn_and_texts_find_their_tokens(actions: list[Any], copies: bool) -> None:
    pool: BufferPool[Any] = BufferPool(ROOM, NUM_PARTS, copies=copies)
    texts: list[Text] = []
    for kind, which, token_ids, count, scope in actions:
        if kind == "open":
            used = pool.num_used
            try:
                text = Text(pool, len(token_ids) + count, token_ids, scope)
            except LookupError:
                assert used + len(token_ids) + count > ROOM  # only what runs is in the way
                continue
            assert text.most <= ROOM
            assert len(text.token_ids) < len(token_ids)
            texts.append(text)
        elif texts:
            text = texts[which % len(texts)]
            if kind == "read":
                text.token_ids += token_ids[: text.buffer.capacity - len(text.token_ids)]
                for part in text.buffer.memory:
                    part[:] = as_read(text.buffer, text.token_ids)
            elif kind == "keep":
                pool.share(text.buffer, text.token_ids[:])
            else:
                texts.remove(text)
                text.close(text.token_ids[:] if kind == "close" else [])
        assert pool.num_used + pool.num_idle <= ROOM
        for text in texts:
            for part in text.buffer.memory:
                assert part[: len(text.token_ids)] == as_read(text.buffer, text.token_ids)
        for buffer in (*pool._idle, *pool._open):  # others may copy what either says that it holds
            for part in buffer.memory:
                assert part[: len(buffer.token_ids)] == as_read(buffer, buffer.token_ids)
    while texts:
        texts.pop().close([])
    assert pool.num_used == 0


def conversation(pool: BufferPool[Any], capacity: int, token_ids: list[int]) -> Text:
    text = Text(pool, capacity, token_ids)
    for part in text.buffer.memory:
        part[:] = token_ids
    text.token_ids = token_ids[:]
    text.close(token_ids)
    return text


def test_a_text_that_parts_from_the_one_whose_buffer_it_takes_over_says_so() -> None:
    pool: BufferPool[Any] = BufferPool(12, NUM_PARTS)
    conversation(pool, 8, [1, 1, 1, 1, 1])
    parting = Text(pool, 8, [1, 0, 0, 0])
    for part in parting.buffer.memory:
        part[:] = [1, 0, 0, 0]
    assert Text(pool, 4, [1, 1, 1]).token_ids == [1]
