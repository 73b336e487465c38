"""Whether a row's logits have the same bits whatever runs with it: the ground that identical text stands on.

differences = probe(engine.main, context=512)
max(differences.values())    # 0.0 where the backend keeps its word
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outrider.types import Chunk

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from numpy.typing import NDArray

    from outrider.types import Backend, Slot

TAIL = 40  # rows that are compared: more than a block of the cache holds, so that a boundary is among them
PIECES = (2048, 512, 100, 64, 33, 32, 16, 2, 1)  # tokens a call
MAX_CALLS = 100  # smaller pieces are left out where a prompt would need more calls
WRONG_DRAFTS = (0, 1, 2, 5, 15)


def probe(main: Backend, context: int) -> dict[str, float]:
    """The largest difference of any logit to a reading in one call, for every other way to read the same tokens.

    `context` random tokens (more than TAIL) are read in pieces of many sizes, beside other sequences, with a beginning
    that another sequence has left in the cache, and with the end decoded token by token in front of drafts that are
    rejected. The last rows are compared: they attend to all keys and values, so what differs anywhere before shows in
    them. Opens three slots of about `context` tokens.
    """
    rng = np.random.default_rng(0)
    token_ids = rng.integers(main.vocab_size, size=context).tolist()
    whole = read(main, token_ids, [context], TAIL)
    sizes = {f"pieces of {n}": [n] * -(-context // n) for n in PIECES if n < context and context // n <= MAX_CALLS}
    uneven = rng.integers(1, 300, size=context).tolist()
    sizes["uneven pieces"] = uneven[: int(np.searchsorted(np.cumsum(uneven), context)) + 1]
    made = {name: _difference(read(main, token_ids, each, TAIL), whole) for name, each in sizes.items()}
    if main.capabilities.fixed is None:  # else there is no room beside it
        made["beside two others"] = _difference(_beside(main, token_ids), whole)
    for n in (min(context // 2 + 1, context - TAIL), context - TAIL):  # the last rows are read anew
        num_cached, rows = _from_the_cache(main, token_ids, n)
        if num_cached:  # not every backend keeps any
            made[f"{num_cached} tokens from the cache"] = _difference(rows, whole)
    for n in WRONG_DRAFTS:
        made[f"{n} wrong drafts" if n else "token by token"] = _difference(_decode(main, token_ids, n), whole)
    return made


def longest_context(main: Backend, max_tokens: int) -> int:
    """The longest `context` that `probe` can have where one sequence may have `max_tokens`."""
    if main.capabilities.fixed:
        return main.max_tokens - max(WRONG_DRAFTS)
    return (max_tokens - TAIL) // 3 - 64  # a slot is rounded up to whole blocks


def read(main: Backend, token_ids: Seq[int], sizes: Seq[int], num_rows: int) -> NDArray[np.float32]:
    """The last logits float32 [num_rows, vocab_size] of tokens that are read in chunks of these sizes."""
    slot = open_slot(main, len(token_ids))
    rows: list[NDArray[np.float32]] = []
    try:
        for size in sizes:
            chunk = token_ids[slot.length : slot.length + size]
            wanted = max(0, min(len(chunk), slot.length + len(chunk) - (len(token_ids) - num_rows)))
            step = main.submit([Chunk(slot, chunk, num_rows=wanted)]).wait()
            rows += [step.logits(i).copy() for i in range(wanted)]
    finally:
        slot.close()
    return np.array(rows)


def open_slot(main: Backend, max_tokens: int) -> Slot:
    """A slot, while nothing else runs."""
    slot = main.open(max_tokens)
    if slot is None:
        raise AssertionError("the cache has no room: nothing else may run beside a certificate")
    return slot


def _beside(main: Backend, token_ids: list[int]) -> NDArray[np.float32]:
    """Two other sequences in every call, one longer and one shorter, with blocks between this one's."""
    count = len(token_ids)
    others = [open_slot(main, count + TAIL), open_slot(main, count)]
    slot = open_slot(main, count)
    head = count - TAIL
    rows: list[NDArray[np.float32]] = []
    try:
        longer, shorter = others
        chunks = [Chunk(longer, token_ids[::-1], 0), Chunk(slot, token_ids[:head], 0), Chunk(shorter, token_ids[:3], 0)]
        main.submit(chunks).wait()
        while slot.length < count:
            size = min(1 + slot.length % 3, count - slot.length)
            chunks = [
                Chunk(longer, [1], num_rows=1),
                Chunk(slot, token_ids[slot.length : slot.length + size], num_rows=size),
                Chunk(shorter, [2, 3], num_rows=0),
            ]
            step = main.submit(chunks).wait()
            rows += [step.logits(1 + i).copy() for i in range(size)]
    finally:
        for each in (slot, *others):
            each.close()
    return np.array(rows)


def _from_the_cache(main: Backend, token_ids: list[int], num_common: int) -> tuple[int, NDArray[np.float32]]:
    """The last rows of a text whose beginning another has left, which went on otherwise; and how much was there."""
    count = len(token_ids)
    other = [*token_ids[:num_common], *((token_id + 1) % main.vocab_size for token_id in token_ids[num_common:])]
    first = open_slot(main, count + 1)
    main.submit([Chunk(first, other, num_rows=0)]).wait()
    first.keep(other)
    first.close()
    slot = main.open(count, token_ids)
    if slot is None:
        raise AssertionError("what was kept takes the room of what runs")
    try:
        num_cached = slot.length
        step = main.submit([Chunk(slot, token_ids[num_cached:], num_rows=TAIL)]).wait()
        return num_cached, np.array([step.logits(i).copy() for i in range(TAIL)])
    finally:
        slot.close()


def _decode(main: Backend, token_ids: list[int], num_drafts: int) -> NDArray[np.float32]:
    """The end of the tokens decoded one by one, each in front of drafts that are then trimmed."""
    count = len(token_ids)
    slot = open_slot(main, count + num_drafts)
    rows = []
    try:
        main.submit([Chunk(slot, token_ids[: count - TAIL], num_rows=0)]).wait()
        for i in range(count - TAIL, count):
            chunk = [token_ids[i], *token_ids[:num_drafts]]
            step = main.submit([Chunk(slot, chunk, num_rows=len(chunk))]).wait()
            rows.append(step.logits(0).copy())
            slot.trim(i + 1)
    finally:
        slot.close()
    return np.array(rows)


def _difference(rows: NDArray[np.float32], whole: NDArray[np.float32]) -> float:
    return float(np.abs(rows - whole).max())
