"""Compares a cached prefix with a fresh reading of the same tokens, now and then, while an engine has nothing to do.

What is published was read by an exact call, and nothing writes to it afterwards. Should that ever fail, by a defect of
the device or of this program, all later texts that begin alike would be wrong, and nobody would notice.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import numpy as np

from outrider.decoding.idle import IdleJob, harmless
from outrider.models.kv import PrefixStore
from outrider.types import Backend, Chunk, Logits, Prompt, Slot, TokenSequence

log = logging.getLogger("outrider")

EVERY_HITS = 100  # requests that begin with a cached prefix, to one that is checked
MOST_TOKENS = 256  # of a prefix that is checked: some hundredths of a percent of the work, as requests are longer
_PIECE_TOKENS = 32  # of a call: a request that comes meanwhile waits for one


class PrefixCheck(IdleJob):
    """The prefix that is to be checked, on one main model.

        check.note(sequence, num_cached_tokens=96)    # of each request that is admitted

    The row after the prefix is computed twice: from the cache, and from a fresh reading. Where rows are exact, both
    have the same bits. If they differ, an error is logged, and all prefixes in the cache and in its files are dropped.

    store: has these files.
    """

    def __init__(self, store: PrefixStore | None = None) -> None:
        self._store = store
        self._num_hits = 0
        self._text: TokenSequence | None = None  # to be checked: the last token is the row's
        self._slot: Slot | None = None  # of the fresh reading
        self._expected: Logits | None = None  # the row from the cache
        self.num_checked = self.num_wrong = 0

    @property
    def is_due(self) -> bool:
        """Whether there is something to read."""
        return self._text is not None

    @property
    def has_begun(self) -> bool:
        """Whether a prefix is partly read, in a slot that is still open."""
        return self._slot is not None

    def note(self, sequence: TokenSequence, num_cached_tokens: int) -> None:
        """Count a request that began with so many cached tokens. Every hundredth prefix is checked."""
        if not num_cached_tokens:
            return
        self._num_hits += 1
        if self._num_hits % EVERY_HITS == 0:
            self._text = _beginning(sequence, min(num_cached_tokens, MOST_TOKENS) + 1)

    def go_on(self, main: Backend, is_cancelled: Callable[[], bool]) -> None:  # noqa: ARG002
        """Read the next piece, and compare at the end. Gives up where rows are not exact, or there is no room."""
        text = self._text
        if text is None or not main.capabilities.bit_exact_batching:
            self._end()
            return
        with harmless("A cached prefix could not be checked"):
            if self._slot is None:
                self._begin(main, text)
            elif (row := _read(main, self._slot, text, _PIECE_TOKENS)) is not None:
                self._compare(main, text, row)
            return
        self._end()

    def pause(self) -> None:
        """Close the slot. The check begins anew later."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.close()

    def _begin(self, main: Backend, text: TokenSequence) -> None:
        """Compute the row from the cache, and open a slot for the fresh reading."""
        prompt = Prompt((), text.scope, text.embeds, adapter=text.adapter, source=text.source, counted=False)
        cached = dataclasses.replace(prompt, token_ids=text.token_ids, answers=text.answers)
        slot = main.open(len(text), cached)
        if slot is not None:
            try:
                is_cached = slot.length == len(text) - 1  # some of it may be evicted
                self._expected = _read(main, slot, text, 1) if is_cached else None
            finally:
                slot.close()
        if self._expected is not None:
            self._slot = main.open(len(text), prompt)
        if self._slot is None:
            self._end()

    def _compare(self, main: Backend, text: TokenSequence, row: Logits) -> None:
        is_same = np.array_equal(row, self._expected) if self._expected is not None else True
        self._end()
        self.num_checked += 1
        if not is_same:
            self.num_wrong += 1
            main.clear_prefixes()
            if self._store is not None:
                self._store.forget("main")
            log.error(
                "A cached prefix of %d tokens differs from a fresh reading of it, so texts that began with it may be "
                "wrong. All cached prefixes were dropped. Run 'outrider verify' on this machine, and report it.",
                len(text) - 1,
            )

    def _end(self) -> None:
        self.pause()
        self._text = self._expected = None


def _beginning(sequence: TokenSequence, end: int) -> TokenSequence | None:
    """The first tokens of a sequence, up to `end` or the image that it is in; None if there are not two."""
    for span in sequence.embeds:
        if span.begin < end < span.begin + len(span.embeds):
            end = span.begin
    if end < 2:
        return None
    return dataclasses.replace(
        sequence,
        token_ids=sequence.token_ids[:end],
        answers=[(first, min(last, end)) for first, last in sequence.answers if first < end],
        embeds=tuple(span for span in sequence.embeds if span.begin < end),
    )


def _read(main: Backend, slot: Slot, text: TokenSequence, most: int) -> Logits | None:
    """Read up to `most` tokens; the last one's row when the text is read to its end."""
    token_ids, generated = text.next_piece(slot.length, most)
    is_last = slot.length + len(token_ids) == len(text)
    chunk = Chunk(slot, token_ids, int(is_last), generated=generated)
    step = main.submit([chunk]).wait()
    return step.rows(chunk)[0].full().copy() if is_last else None
