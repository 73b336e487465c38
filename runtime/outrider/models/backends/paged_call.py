"""The inputs of a call of a model with paged attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import RequestError
from outrider.models.backends.paged_graph import ROWS, STATE_BEGINS
from outrider.models.backends.paged_slot import SCRATCH
from outrider.models.kv import LAST, ZERO_ROW, StateCall
from outrider.types import Chunk, RowRule, SteadyRows


class _Chain(NamedTuple):
    """A chunk's branch, as indices of its tokens, the blocks that it is read with, and the rows of its states."""

    chunk: Chunk
    branch: Sequence[int]
    blocks: NDArray[np.int32]
    states: StateCall | None


def _branches(chunk: Chunk) -> Iterator[tuple[Sequence[int], NDArray[np.int32], StateCall | None]]:
    """A chunk's branches with their blocks and rows."""
    states = chunk.slot.state_calls or itertools.repeat(None)
    branches, blocks = chunk.layout.branches, (chunk.slot.blocks, *chunk.slot.branch_blocks)
    if len(branches) > len(blocks):
        raise RequestError(
            f"A chunk of {len(chunk.token_ids)} tokens is a tree of {len(branches)} branches (parents={chunk.parents})"
            f", and its slot has room for {len(blocks)}. Call the slot's fork before."
        )
    yield from zip(branches, blocks, states, strict=False)


@dataclass(slots=True)
class PagedCall:
    """Chunks of one or several slots, end to end, padded by a rule. A tree is read branch by branch.

        PagedCall.of(chunks, rule, block_size=32).inputs()    # by name; see `to_paged_attention`

    The attention works on sequences: rows, their number of earlier tokens and their blocks. A chunk is a sequence.
    Where the rule separates rows, each token of an answer is a sequence of one row instead. Its earlier tokens include
    those of the same call, because all keys and values are written to the cache before any row reads them.

    States go through a chain from its first token to its last, whatever the attention sees. They read one row of their
    tables and write others. Padding is a sequence of its own to them, as it would change the state at a chain's end.
    Most leave out dummy rows: what they give there is what was in memory, and nobody reads it.
    """

    block_size: int
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # of logits
    past_lens: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=lambda: [0])
    blocks: list[NDArray[np.int32]] = field(default_factory=list)
    longest: int = 0
    places: dict[Chunk, Sequence[int]] = field(default_factory=dict)  # the row of each of a chunk's tokens
    adapters: list[str | None] = field(default_factory=list)  # that rows are read with; padding has none
    state_begins: list[int] = field(default_factory=lambda: [0])
    states: list[StateCall] = field(default_factory=list)  # by sequence
    spare_row: Callable[[], int] | None = None  # that padding writes to; None: the model has no states
    # Of each chain the slot, its first row, how many rows it has without padding, and the first one's position.
    chains: list[tuple[Any, int, int, int]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        chunks: Sequence[Chunk],
        rule: RowRule,
        block_size: int,
        steady: SteadyRows | None = None,
        spare_row: Callable[[], int] | None = None,
        *,
        covers_all: bool = False,
    ) -> PagedCall:
        """A call with these chunks and all padding.

        spare_row: gives a row of states for padding, if there are any. covers_all: see `needs_all_rows`.
        """
        call = cls(block_size, spare_row=spare_row)
        chains = [_Chain(chunk, *branch) for chunk in chunks for branch in _branches(chunk)]
        if not rule.separate:
            counts = [rule.sequence(len(chain.branch)) for chain in chains]
            counts[-1] += rule.call(sum(counts)) - sum(counts)
            for chain, count in zip(chains, counts, strict=True):
                call._add(chain, count)
        else:
            for chain in chains:
                call._add(chain, 1 if chain.chunk.generated else rule.sequence(len(chain.branch)))
            num_rows = len(call.token_ids)
            has_piece = num_rows > len(call.past_lens)  # a sequence with several rows
            num_dummies = 0 if has_piece else rule.dummy_rows
            call._add_dummy(rule.call(num_rows + num_dummies) - num_rows)
        if steady:
            num_idle = steady.next(len(call.token_ids)) - len(call.token_ids)
            for _ in range(num_idle if rule.separate else 1):
                call._add_dummy(1 if rule.separate else num_idle)
        if covers_all:
            call._add_spare_state()
        for chunk in chunks:
            call.rows.extend(call.places[chunk][len(chunk.token_ids) - chunk.num_rows :])
        # Not every device takes a call without rows of logits.
        call.rows.extend([call.rows[-1] if call.rows else 0] * (rule.logits(len(call.rows)) - len(call.rows)))
        return call

    def hidden_states(self, chunks: Sequence[Chunk], width: int) -> NDArray[np.float32]:
        """The chunks' hidden states, float32 [n, width], with zeros where there are none."""
        made = np.zeros((len(self.token_ids), width), dtype=np.float32)
        for chunk in chunks:
            if chunk.hidden_states is not None:
                made[[*self.places[chunk]]] = chunk.hidden_states
        return made

    def inputs(self) -> dict[str, NDArray[Any]]:
        """The arrays by the names of the model's inputs."""
        block_begins = [0, *itertools.accumulate(map(len, self.blocks))]
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.array(self.token_ids, dtype=np.int64),
            "position_ids": np.array(self.positions, dtype=np.int64),
            "past_lens": np.array(self.past_lens, dtype=np.int32),
            "subsequence_begins": np.array(self.begins, dtype=np.int32),
            "block_indices_begins": np.array(block_begins, dtype=np.int32),
            "block_indices": np.concatenate(self.blocks),
            "max_context_len": np.array(self.longest, dtype=np.int32),
            ROWS: np.array(self.rows, dtype=np.int64),
        }
        if self.spare_row is None:
            return inputs
        rows = [[each.row, *each.stored] for each in self.states]
        of_states = {
            STATE_BEGINS: self.state_begins,
            "la.block_indices": [row for each in rows for row in each],
            "la.block_indices_begins": [0, *itertools.accumulate(map(len, rows))],
            "la.past_lens": [each.past for each in self.states],
            "la.cache_interval": [each.interval for each in self.states],
        }
        return inputs | {name: np.array(values, dtype=np.int32) for name, values in of_states.items()}

    def _add(self, chain: _Chain, num_rows: int) -> None:
        """Add a chain: as one sequence, padded to `num_rows`, or if these are fewer, one sequence for each token."""
        chunk, branch = chain.chunk, chain.branch
        past, count, first = chunk.slot.length, len(branch), len(self.token_ids)
        self.chains.append((chunk.slot, first, count, past))
        if chunk.layout.is_tree:
            places = self.places[chunk] = [*self.places.get(chunk, [-1] * len(chunk.token_ids))]
            for row, i in enumerate(branch, first):
                if places[i] < 0:  # a token that branches share is read in each of them, and its first row counts
                    places[i] = row
        else:
            self.places[chunk] = range(first, first + count)
        self.token_ids.extend([chunk.token_ids[i] for i in branch] if chunk.layout.is_tree else chunk.token_ids)
        self.adapters.extend([chunk.slot.adapter] * count)
        begin = chunk.slot.first_position + past
        self.positions.extend(range(begin, begin + count))
        if chain.states is not None:
            self.states.append(chain.states)
            self.state_begins.append(first + count)
        if num_rows < count:
            for i in range(count):
                self._add_sequence(past + i, 1, chain.blocks)
            return
        # Padding has the last token's position: the model's context may end there.
        self.token_ids.extend([0] * (num_rows - count))
        self.adapters.extend([None] * (num_rows - count))
        self.positions.extend([begin + count - 1] * (num_rows - count))
        self._add_spare_state()
        self._add_sequence(past, num_rows, chain.blocks)

    def _add_dummy(self, num_rows: int) -> None:
        """Add rows of no slot, without earlier tokens, so that the attention takes no time for them."""
        if num_rows:
            self.token_ids.extend([0] * num_rows)
            self.adapters.extend([None] * num_rows)
            self.positions.extend(range(num_rows))
            self._add_sequence(0, num_rows, SCRATCH)

    def _add_spare_state(self) -> None:
        """Let states go through the padding that was added last, as one sequence."""
        if self.spare_row is not None and self.state_begins[-1] < len(self.token_ids):
            self.states.append(StateCall(ZERO_ROW, 0, LAST, (1,), (self.spare_row(),)))
            self.state_begins.append(len(self.token_ids))

    def _add_sequence(self, past: int, num_rows: int, blocks: NDArray[np.int32]) -> None:
        self.past_lens.append(past)
        self.begins.append(self.begins[-1] + num_rows)
        self.blocks.append(blocks[: -(-(past + num_rows) // self.block_size)])
        self.longest = max(self.longest, past + num_rows)
