"""A drafter that reads hidden states, in plain NumPy."""

import zlib
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.testing.fake import FakeBackend, FakeSlot
from outrider.types import Chunk, Logits

Kind: TypeAlias = Literal["module", "block"]


class FakeHead(FakeBackend):
    """A drafter whose logits are a fixed random function of every token that it has read and its hidden states.

        FakeHead(16, "module", hidden_width=4, own_width=4)    # or "block"

    One wrong row of hidden states, however old, gives other logits. kind: what chunks are, see
    `outrider.models.backends.heads`. hidden_width: of the hidden states that it reads. own_width: of those that a
    module makes, its feature "next_hidden", or of a block's "block_states". In a slot, `shifts` has `row_id` of each
    token's hidden states. Raises AssertionError for hidden states of another shape.
    """

    def __init__(self, vocab_size: int, kind: Kind, *, hidden_width: int, own_width: int = 0, seed: int = 0) -> None:
        made = {"module": ("next_hidden",), "block": ("block_states",) if own_width else ()}
        super().__init__(vocab_size, seed=seed, features=made.get(kind, ()))
        self.kind, self.hidden_width, self.own_width = kind, hidden_width, own_width

    def submit(self, chunks: Sequence[Chunk]) -> FakeBackend.Step:
        """Evaluate chunks at once; the step is its own pending."""
        self.calls.append([len(chunk.token_ids) for chunk in chunks])
        logits: dict[Chunk, list[NDArray[np.float32]]] = {}
        features: dict[Chunk, NDArray[np.float32]] = {}
        for chunk in chunks:
            chunk.check_chain(self)
            slot: FakeSlot = chunk.slot
            if slot.closed or slot.backend is not self or slot.length + len(chunk.token_ids) > slot.max_tokens:
                raise AssertionError(f"slot closed, foreign or overfilled: {slot}")
            row_ids = self._row_ids(chunk)
            count = len(row_ids)
            slot.token_ids += chunk.token_ids[:count]
            slot.shifts += row_ids
            block = chunk.token_ids[count:]
            rows = logits[chunk] = []
            for i in range(chunk.num_rows):
                end = slot.length if block else slot.length - chunk.num_rows + 1 + i
                rows.append(self.logits_for(slot.token_ids[:end], slot.shifts[:end], block, place=i if block else 0))
            if chunk.features and block:
                read = slot.token_ids, slot.shifts, block
                places = [self.block_state(*read, place=i) for i in range(chunk.num_rows)]
                features[chunk] = np.array(places)
            elif chunk.features:
                ends = range(slot.length - count + 1, slot.length + 1)
                features[chunk] = np.array([self.next_hidden(slot.token_ids[:n], slot.shifts[:n]) for n in ends])
        return FakeBackend.Step(logits, features)

    def logits_for(
        self, token_ids: Sequence[int], row_ids: Sequence[int], block: Sequence[int] = (), *, place: int = 0
    ) -> Logits:
        """float32 [vocab_size] after tokens with these hidden states, and after or inside a block."""
        return _random(self.vocab_size, self.seed, len(block), place, *token_ids, *block, *row_ids)

    def next_hidden(self, token_ids: Sequence[int], row_ids: Sequence[int]) -> NDArray[np.float32]:
        """float32 [own_width], the module's own hidden states after these."""
        return _random(self.own_width, self.seed + 1, *token_ids, *row_ids)

    def block_state(
        self, token_ids: Sequence[int], row_ids: Sequence[int], block: Sequence[int], *, place: int
    ) -> NDArray[np.float32]:
        """float32 [own_width], what a correction reads of a block's place."""
        return _random(self.own_width, self.seed + 1, place, *token_ids, *block, *row_ids)

    @staticmethod
    def row_id(row: NDArray[np.float32]) -> int:
        """A number that stands for hidden states float32 [hidden_width]."""
        return zlib.crc32(np.ascontiguousarray(row).tobytes())

    def _row_ids(self, chunk: Chunk) -> list[int]:
        """What stands for the hidden states of a chunk, one number for each row."""
        given = np.zeros((0, self.hidden_width), np.float32) if chunk.hidden_states is None else chunk.hidden_states
        num_rows = len(chunk.token_ids) if self.kind == "module" else len(given)
        is_block = self.kind == "block"
        if given.shape != (num_rows, self.hidden_width) or (is_block and num_rows >= len(chunk.token_ids)):
            raise AssertionError(f"{len(chunk.token_ids)} tokens have hidden states {list(given.shape)}")
        if given.dtype != np.float32:
            raise AssertionError(f"hidden states are {given.dtype}")
        return [self.row_id(row) for row in given]


def _random(count: int, *key: int) -> NDArray[np.float32]:
    """float32 [count], a fixed random function of the key."""
    hashed = zlib.crc32(np.array(key, dtype=np.int64).tobytes())
    return np.random.default_rng(hashed).standard_normal(count).astype(np.float32)
