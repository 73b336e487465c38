"""Whisper's rules for timestamps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.types import Logits


class Timestamps:
    """Timestamps come in pairs, ascend, begin and end the text, and win where they are likelier than any text.

    Source: openai/whisper, `decoding.py: ApplyTimestampRules`; Transformers' `WhisperTimeStampLogitsProcessor`. The
    last rule compares the probability of all timestamps with the likeliest other token's, so it needs whole rows.

    first: the token of 0.00 s, behind which are all others. no_timestamps: the token that would mean none. eos: the
    lowest id that is no text. max_initial: how many tokens behind `first` the first timestamp may be.
    """

    def __init__(self, first: int, no_timestamps: int, eos: int, max_initial: int) -> None:
        self._first, self._no_timestamps, self._eos, self._max_initial = first, no_timestamps, eos, max_initial
        self._answer: list[int] = []

    def commit(self, token_ids: Seq[int]) -> None:
        """Add tokens of the answer."""
        self._answer += token_ids

    def apply(self, logits: Logits, prefix: Seq[int]) -> None:
        """Ban, in place, what may not follow the answer and `prefix`."""
        answer, first = [*self._answer, *prefix], self._first
        logits[self._no_timestamps] = -np.inf
        if not answer:
            logits[:first] = -np.inf
            logits[first + self._max_initial + 1 :] = -np.inf
            return
        is_last = answer[-1] >= first
        is_before = len(answer) < 2 or answer[-2] >= first  # the one before it
        if is_last and is_before:  # a pair is complete, or the text begins
            logits[first:] = -np.inf
        elif is_last:  # its second, or the end
            logits[: self._eos] = -np.inf
        latest = next((token_id for token_id in reversed(answer) if token_id >= first), None)
        if latest is not None:  # a segment may not be empty, but the next one may begin where it ends
            logits[first : latest if is_last and not is_before else latest + 1] = -np.inf
        stamps, others = logits[first:], logits[:first]
        highest = float(stamps.max(initial=-np.inf))
        if highest == -np.inf:
            return
        total = highest + float(np.log(np.exp(stamps.astype(np.float64) - highest).sum()))
        if total > float(others.max()):
            logits[:first] = -np.inf
