"""Reads the same tokens in several ways, and compares the bits of their rows."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from outrider.models.cost.slots import copied_rows, open_slot, random_tokens
from outrider.types import Chunk, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from outrider.types import Backend, EncoderSource

    Rows: TypeAlias = NDArray[np.float32]  # [rows, vocab_size]

TAIL = 40  # rows that are compared: more than a block of the cache holds, so that they cross a boundary
PIECES = (2048, 512, 100, 64, 33, 32, 16, 2, 1)  # tokens per call
MAX_CALLS = 100  # sizes that need more calls to read the context are left out
WRONG_DRAFTS = (0, 1, 2, 5, 15)
_NUM_CUTS = 4  # of a prompt, at random places
_NUM_DRAFTED = (1, 4, 8)  # tokens of drafts that are rejected at every place


class _Reading(NamedTuple):
    """A way to read tokens. num_generated: how many at the end are read as an answer. rows: gives the last rows."""

    num_generated: int
    rows: Callable[[list[int]], Rows]


def compare_quickly(main: Backend, context: int, made: dict[str, float] | None = None) -> dict[str, float]:
    """As `compare_readings`, for a few calls of each kind. made: as for `check_exactness`."""
    # All answers have one length, and so one reading to be compared with.
    growing = list(itertools.takewhile(lambda n: n * (n + 1) // 2 < context, itertools.count(1)))
    drafts: tuple[int, ...] = (0, 15, 1, 2, 5, 7, 3, 4)
    num_generated = len(drafts)
    if main.capabilities.fixed:  # another model reads prompts: it reads as many tokens as in one call
        drafts *= TAIL // len(drafts)
    readings = {
        "pieces that grow": _in_pieces(main, [context - sum(growing), *growing]),
        "large pieces": _in_pieces(main, [context - context // 3 - 33, 33, context // 3]),
        "wrong drafts": _with_drafts(main, drafts),
        "from the cache": _Reading(0, partial(_from_the_cache, main, num_common=context - TAIL)),
    }
    if main.capabilities.fixed is None:
        readings |= _in_company(main, num_generated)
        among = partial(_among, main, num_sequences=8, num_generated=num_generated)
        readings["among eight alike"] = _Reading(num_generated, among)
    return _compare(main, context, readings, made)


def compare_readings(main: Backend, context: int) -> dict[str, float]:
    """The largest logit difference from a reading in one call, for each other way to read the same tokens.

    `context` random tokens (more than TAIL) are read in pieces of many sizes, beside other sequences, with a prefix
    that another sequence has published, and with the last tokens decoded one by one, each with a rejected draft. The
    last rows are compared. They attend to all keys and values, so a difference at any earlier token shows in them.
    Where the backend separates the rows of answers, readings are compared with one of the same prompt and answer.
    Opens three slots of about `context` tokens.
    """
    rng = np.random.default_rng(0)
    sizes = {f"pieces of {n}": [n] * -(-context // n) for n in PIECES if n < context and context // n <= MAX_CALLS}
    uneven = rng.integers(1, 300, size=context).tolist()
    sizes["uneven pieces"] = uneven[: _num_until(uneven, context)]
    readings = {name: _in_pieces(main, each) for name, each in sizes.items()}
    if main.capabilities.fixed is None:  # fixed shapes have no room for another sequence
        readings |= _in_company(main, TAIL)
        answer = partial(_from_the_cache, main, num_common=context - TAIL // 2, num_generated=TAIL)
        readings["an answer from the cache"] = _Reading(TAIL, answer)
    for n in (min(context // 2 + 1, context - TAIL), context - TAIL):  # the last rows are not from the cache
        readings[f"{n} tokens from the cache"] = _Reading(0, partial(_from_the_cache, main, num_common=n))
    for n in WRONG_DRAFTS:
        readings[f"{n} wrong drafts" if n else "token by token"] = _with_drafts(main, (n,) * TAIL)
    return _compare(main, context, readings)


def compare_states(main: Backend, context: int) -> dict[str, float]:
    """As `compare_readings`, for a model whose layers keep states: where they are stored, and what is read from there.

    The same prompt is cut in two anywhere; an answer is decoded with drafts that are rejected at every place.
    """
    rng = np.random.default_rng(0)
    cuts = {context - TAIL, context - 1, *rng.integers(1, context, size=_NUM_CUTS).tolist()}
    readings = {f"a prompt cut after {n} tokens": _in_pieces(main, [n, context - n]) for n in sorted(cuts)}
    uneven = rng.integers(1, 10, size=context).tolist()
    readings["a prompt in pieces of any size"] = _in_pieces(main, uneven[: _num_until(uneven, context)])
    for n in _NUM_DRAFTED:
        readings[f"{n} drafts rejected at every place"] = _Reading(TAIL, partial(_go_back, main, num_drafted=n))
    return _compare(main, context, readings)


def _num_until(sizes: Sequence[int], count: int) -> int:
    """How many pieces of these sizes have `count` tokens."""
    return int(np.searchsorted(np.cumsum(sizes), count)) + 1


def _in_pieces(main: Backend, sizes: Sequence[int]) -> _Reading:
    return _Reading(0, partial(read, main, sizes=sizes, num_rows=TAIL))


def _in_company(main: Backend, num_rows: int) -> dict[str, _Reading]:
    return {
        "beside two others": _Reading(num_rows, partial(_beside, main, num_rows=num_rows, generated=True)),
        "a prompt beside two others": _Reading(0, partial(_beside, main, num_rows=num_rows, generated=False)),
    }


def _with_drafts(main: Backend, nums_drafts: Sequence[int]) -> _Reading:
    return _Reading(len(nums_drafts), partial(_decode, main, nums_drafts=nums_drafts))


def _compare(
    main: Backend, context: int, readings: dict[str, _Reading], made: dict[str, float] | None = None
) -> dict[str, float]:
    """The largest difference of the last rows from a reading in one call, for each of `readings` but those `made`."""
    token_ids = random_tokens(main, context)
    references: dict[int, Rows] = {}
    made = {} if made is None else made
    for name, reading in readings.items():
        if name in made:
            continue
        num_generated = reading.num_generated if main.capabilities.rows.separate else 0
        if num_generated not in references:
            references[num_generated] = _read_whole(main, token_ids, num_generated)
        rows = reading.rows(token_ids)
        if len(rows):  # some backends have no prefix cache
            made[name] = float(np.abs(rows - references[num_generated][-len(rows) :]).max())
    return made


def _read_whole(main: Backend, token_ids: list[int], num_generated: int) -> Rows:
    """The last rows, of tokens that are read in one call, or in two if the last `num_generated` are an answer."""
    count, rows = len(token_ids), []
    with closing(open_slot(main, count)) as slot:
        for begin, end in ((0, count - num_generated), (count - num_generated, count)):
            if end > begin:
                num_rows = min(TAIL, end - begin)
                chunk = Chunk(slot, token_ids[begin:end], num_rows, generated=begin > 0)
                rows += copied_rows(main.submit([chunk]).wait(), chunk)
    return np.array(rows)


def longest_context(main: Backend, max_tokens: int) -> int:
    """The longest `context` for `compare_readings` if one sequence may have `max_tokens`."""
    if main.capabilities.fixed:
        return main.max_tokens - max(WRONG_DRAFTS)
    return (max_tokens - TAIL) // 3 - 64  # a slot is rounded up to whole blocks


def longest_certified(main: Backend, cache_tokens: int, max_tokens: int) -> int:
    """The longest `context` for `compare_readings` with a cache of `cache_tokens` and sequences of `max_tokens`."""
    longest = longest_context(main, cache_tokens)
    if main.capabilities.fixed:
        return longest
    return min(longest, max_tokens - TAIL - max(WRONG_DRAFTS))


def read(
    main: Backend, token_ids: Sequence[int], sizes: Sequence[int], num_rows: int, source: EncoderSource | None = None
) -> Rows:
    """The last rows of logits, float32 [num_rows, vocab_size], of tokens that are read in chunks of these sizes.

    source: what an encoder reads.
    """
    rows = []
    with closing(open_slot(main, len(token_ids), Prompt((), source=source))) as slot:
        for size in sizes:
            piece = token_ids[slot.length : slot.length + size]
            wanted = max(0, min(len(piece), slot.length + len(piece) - (len(token_ids) - num_rows)))
            chunk = Chunk(slot, piece, num_rows=wanted)
            rows += copied_rows(main.submit([chunk]).wait(), chunk)
    return np.array(rows)


def _beside(main: Backend, token_ids: list[int], num_rows: int, *, generated: bool) -> Rows:
    """The last rows, with a longer and a shorter sequence in every call. Their blocks lie between this one's."""
    count, rows = len(token_ids), []
    with ExitStack() as opened:
        longer, shorter, slot = (
            opened.enter_context(closing(open_slot(main, size))) for size in (count + TAIL, count, count)
        )
        head = Chunk(slot, token_ids[: count - num_rows], 0)
        main.submit([Chunk(longer, token_ids[::-1], 0), head, Chunk(shorter, token_ids[:3], 0)]).wait()
        while slot.length < count:
            size = min(1 + slot.length % 3, count - slot.length)
            chunks = [
                Chunk(longer, [1], num_rows=1, generated=True),
                Chunk(slot, token_ids[slot.length : slot.length + size], num_rows=size, generated=generated),
                Chunk(shorter, [2, 3], num_rows=0, generated=slot.length % 2 == 0),
            ]
            rows += copied_rows(main.submit(chunks).wait(), chunks[1])
    return np.array(rows)


def _from_the_cache(main: Backend, token_ids: list[int], num_common: int, num_generated: int = 0) -> Rows:
    """The last rows of a text that starts from another text's published prefix; none without a prefix cache.

    Where layers keep states, the first text that parts from another stores them there, for the next one. num_generated:
    the last tokens, which are an answer; its rows count only if the prefix cache has all of the prefix.
    """
    count = len(token_ids)
    begin = count - num_generated
    answers = ((begin, count),) if num_generated else ()
    other = [*token_ids[:num_common], *((token_id + 1) % main.vocab_size for token_id in token_ids[num_common:])]
    _publish(main, other, begin, Prompt(()))
    for is_last in (False, True):
        with closing(open_slot(main, count, Prompt(token_ids, answers=answers))) as slot:
            if slot.length == num_common if num_generated else slot.length > 0:
                num_rows = min(TAIL, count - slot.length)
                chunk = Chunk(slot, token_ids[slot.length :], num_rows, generated=num_generated > 0)
                return np.array(copied_rows(main.submit([chunk]).wait(), chunk))
        if not is_last:
            _publish(main, token_ids, begin, Prompt(token_ids, answers=answers))
    return np.array([])


def _publish(main: Backend, token_ids: list[int], begin: int, prompt: Prompt) -> None:
    """Read a text, after what the prefix cache has of `prompt`, and publish it. From token `begin` on, an answer."""
    with closing(open_slot(main, len(token_ids) + 1, prompt)) as slot:
        if slot.length < begin:
            main.submit([Chunk(slot, token_ids[slot.length : begin], num_rows=0)]).wait()
        if slot.length < len(token_ids):
            main.submit([Chunk(slot, token_ids[slot.length :], num_rows=0, generated=True)]).wait()
        slot.publish(token_ids)


def _among(main: Backend, token_ids: list[int], num_sequences: int, num_generated: int) -> Rows:
    """The last rows of the first of several sequences, which have one row each per call."""
    rows = []
    with ExitStack() as opened:
        slots = [opened.enter_context(closing(open_slot(main, len(token_ids)))) for _ in range(num_sequences)]
        for i, slot in enumerate(slots):  # the others have different lengths, and are shorter
            main.submit([Chunk(slot, token_ids[: 5 + i if i else -num_generated], num_rows=0)]).wait()
        for token_id in token_ids[-num_generated:]:
            chunks = [Chunk(slot, [token_id], num_rows=1, generated=True) for slot in slots]
            rows += copied_rows(main.submit(chunks).wait(), chunks[0])
    return np.array(rows)


def _go_back(main: Backend, token_ids: list[int], num_drafted: int) -> Rows:
    """The last rows of an answer, decoded with drafts of which 0, 1, … tokens are right."""
    begin, rows, num_right = len(token_ids) - TAIL, list[Any](), 0
    with closing(open_slot(main, len(token_ids) + num_drafted)) as slot:
        main.submit([Chunk(slot, token_ids[:begin], num_rows=0)]).wait()
        while (at := begin + len(rows)) < len(token_ids):
            right = token_ids[at : at + 1 + num_right]
            wrong = [(token_id + 1) % main.vocab_size for token_id in token_ids[: num_drafted - num_right]]
            chunk = Chunk(slot, right + wrong, num_rows=len(right) + len(wrong), generated=True)
            rows += copied_rows(main.submit([chunk]).wait(), chunk)[: len(right)]
            slot.trim(at + len(right))
            if slot.length < at + len(right):  # no row of this length was kept: it is read again
                rows = rows[: slot.length - begin]
            num_right = (num_right + 1) % (num_drafted + 1)
    return np.array(rows)


def _decode(main: Backend, token_ids: list[int], nums_drafts: Sequence[int]) -> Rows:
    """The last rows, decoded one by one, each with this number of wrong draft tokens, which are then trimmed."""
    begin, rows = len(token_ids) - len(nums_drafts), []
    with closing(open_slot(main, len(token_ids) + max(nums_drafts))) as slot:
        main.submit([Chunk(slot, token_ids[:begin], num_rows=0)]).wait()
        for i, num_drafts in enumerate(nums_drafts, begin):
            read = token_ids[slot.length : i + 1]  # more than one where the slot went back further
            chunk = Chunk(slot, [*read, *token_ids[:num_drafts]], num_rows=1 + num_drafts, generated=True)
            rows += copied_rows(main.submit([chunk]).wait(), chunk)[:1]
            slot.trim(i + 1)
    return np.array(rows)
