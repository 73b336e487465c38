"""OpenVINO for drafters that read hidden states and are no decoders; see `outrider.models.backends.heads`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.models.backends.heads.block import IN_BLOCK, ORDER
from outrider.models.backends.heads.layers import ROW_TYPES
from outrider.models.backends.openvino_paged import OpenVINOPaged
from outrider.models.backends.paged_graph import HIDDEN_IN, ROWS
from outrider.types import Chunk, RowCost, RowRule


class OpenVINOBlock(OpenVINOPaged):
    """A drafter whose chunks are context tokens with their hidden states, and after them a block without any.

        Chunk(slot, [*context, newest, *masks], num_rows=len(masks), hidden_states=rows)

    Only the context stays in the cache. The block is overwritten by the next chunk. Features are those of the rows
    that have logits.
    """

    @property
    def separate_rules(self) -> Sequence[RowRule]:
        """None: the rows of a block see each other."""
        return ()

    def keep_rows(self, cost: RowCost) -> None:
        """Do nothing: the rows of a block see each other."""

    def _append(self, chunk: Chunk) -> None:
        chunk.slot.record(chunk.token_ids[: _num_context(chunk)])

    def _inputs_of(self, chunks: Sequence[Chunk]) -> tuple[dict[str, NDArray[Any]], dict[Chunk, Sequence[int]]]:
        counts = [(_num_context(chunk), len(chunk.token_ids)) for chunk in chunks]
        num_context = sum(context for context, _ in counts)
        order, in_block, rows, types = list[int](), list[int](), list[int](), list[int]()
        at_context, at_block = 0, num_context
        places: dict[Chunk, Sequence[int]] = {}
        for chunk, (context, count) in zip(chunks, counts, strict=True):
            size = count - context
            in_block += range(len(order) + context, len(order) + count)
            order += [*range(at_context, at_context + context), *range(at_block, at_block + size)]
            types += [0] * context + [1] * size
            at_context, at_block = at_context + context, at_block + size
            own = range(at_block - num_context - chunk.num_rows, at_block - num_context)
            places[chunk] = own
            rows += own
        pasts = [chunk.slot.length for chunk in chunks]
        ends = [past + count for past, (_, count) in zip(pasts, counts, strict=True)]
        blocks = [chunk.slot.blocks[: -(-end // self.block_size)] for chunk, end in zip(chunks, ends, strict=True)]
        known = [chunk.hidden_states for chunk in chunks if chunk.hidden_states is not None]
        return {
            "input_ids": _longs(
                token_id
                for chunk, (context, _) in zip(chunks, counts, strict=True)
                for token_id in chunk.token_ids[context:]
            ),
            HIDDEN_IN: np.concatenate(known) if known else np.zeros((0, self._hidden_width), dtype=np.float32),
            "position_ids": _longs(i for past, end in zip(pasts, ends, strict=True) for i in range(past, end)),
            ORDER: _longs(order),
            IN_BLOCK: _longs(in_block),
            ROW_TYPES: np.array(types, dtype=np.int32),
            "past_lens": np.array(pasts, dtype=np.int32),
            "subsequence_begins": _sums(count for _, count in counts),
            "block_indices_begins": _sums(map(len, blocks)),
            "block_indices": np.concatenate(blocks),
            "max_context_len": np.array(max(ends), dtype=np.int32),
            ROWS: _longs(rows or [0]),
        }, places


def _num_context(chunk: Chunk) -> int:
    """Tokens of the context in a chunk."""
    return 0 if chunk.hidden_states is None else len(chunk.hidden_states)


def _longs(values: Any) -> NDArray[np.int64]:
    return np.array([*values], dtype=np.int64)


def _sums(counts: Any) -> NDArray[np.int32]:
    return np.array([0, *itertools.accumulate(counts)], dtype=np.int32)
