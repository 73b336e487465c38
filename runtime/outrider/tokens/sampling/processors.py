"""Processors of logits: biases, penalties, and bans, by which logits become −inf."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from outrider.config import GenerationConfig
from outrider.types import Logits


class LogitBias:
    """Adds a number to the logits of some tokens, as `logit_bias` of OpenAI's API."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._token_ids = _ids(biases)
        self._biases = np.fromiter(biases.values(), dtype=np.float32, count=len(biases))

    def commit(self, token_ids: Sequence[int]) -> None:
        """Nothing to remember."""

    def apply(self, logits: Logits, prefix: Sequence[int]) -> None:  # noqa: ARG002
        """Change the logits in place."""
        logits[self._token_ids] += self._biases


class Penalties:
    """Repetition, presence and frequency penalties of one sequence.

    Repetition (Keskar et al. 2019, CTRL; Transformers): a positive logit of a token in prompt or answer is divided by
    the penalty, a negative one multiplied. Presence and frequency (OpenAI's API): with c the token's count in the
    answer, its logit loses `presence_penalty * (c > 0) + frequency_penalty * c`.
    """

    def __init__(self, config: GenerationConfig, prompt_token_ids: Sequence[int]) -> None:
        self._repetition = np.float32(config.repetition_penalty)
        self._presence = config.presence_penalty
        self._frequency = config.frequency_penalty
        self._seen = set(prompt_token_ids) if config.repetition_penalty != 1 else set()
        self._counts: Counter[int] = Counter()

    @property
    def active(self) -> bool:
        """Whether any penalty is set."""
        return bool(self._repetition != 1 or self._presence or self._frequency)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Count tokens of the answer."""
        if self._repetition != 1:
            self._seen.update(token_ids)
        self._counts.update(token_ids)

    def apply(self, logits: Logits, prefix: Sequence[int]) -> None:
        """Change the logits in place. `prefix` follows the committed tokens."""
        if self._repetition != 1:
            seen = _ids(self._seen.union(prefix))
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._presence or self._frequency:
            counts = self._counts + Counter(prefix)
            penalties = [self._presence + self._frequency * count for count in counts.values()]
            logits[_ids(counts)] -= np.asarray(penalties, dtype=np.float32)


class NoRepeatNgram:
    """No n-gram of prompt and answer comes twice (Paulus et al. 2017, "A deep reinforced model for summarization").

    As Transformers' `NoRepeatNGramLogitsProcessor`. An index maps each (n − 1)-gram of the committed tokens to the
    tokens that followed it, so that the cost of a row does not grow with the answer.
    """

    def __init__(self, size: int, prompt_token_ids: Sequence[int]) -> None:
        self._num_before = size - 1
        self._followers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        self._tail: list[int] = []  # the last n − 1 committed tokens, or fewer at the beginning
        self.commit(prompt_token_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Index the n-grams that these tokens complete."""
        for before, token_id in self._ngrams(token_ids):
            self._followers[before].add(token_id)
        self._tail = self._last(token_ids)

    def apply(self, logits: Logits, prefix: Sequence[int]) -> None:
        """Ban, in place, tokens that would repeat an n-gram of the committed tokens and `prefix`."""
        last = tuple(self._last(prefix))
        banned = [token_id for before, token_id in self._ngrams(prefix) if before == last]
        # At the beginning, `last` is shorter than n − 1, and is no key.
        logits[[*self._followers.get(last, ()), *banned]] = -np.inf

    def _ngrams(self, token_ids: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
        """The n-grams that `token_ids` complete after the committed tokens, as (first n − 1 tokens, last token)."""
        n, context = self._num_before, [*self._tail, *token_ids]
        return [(tuple(context[at - n : at]), context[at]) for at in range(max(n, len(self._tail)), len(context))]

    def _last(self, token_ids: Sequence[int]) -> list[int]:
        """The last n − 1 tokens, if `token_ids` follow the committed ones."""
        context = [*self._tail, *token_ids]
        return context[max(len(context) - self._num_before, 0) :]


class MinNewTokens:
    """Bans tokens that would end a shorter answer: Transformers' `MinNewTokensLengthLogitsProcessor`."""

    def __init__(self, min_new_tokens: int, end_token_ids: Collection[int]) -> None:
        self._num_missing = min_new_tokens
        self._end_token_ids = list(end_token_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Count tokens of the answer."""
        self._num_missing -= len(token_ids)

    def apply(self, logits: Logits, prefix: Sequence[int]) -> None:
        """Change the logits in place."""
        if len(prefix) < self._num_missing:
            logits[self._end_token_ids] = -np.inf


class BannedTokens:
    """Bans tokens everywhere: Transformers' `SuppressTokensLogitsProcessor`."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = np.asarray(token_ids, dtype=np.int64)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Nothing to remember."""

    def apply(self, logits: Logits, prefix: Sequence[int]) -> None:  # noqa: ARG002
        """Change the logits in place."""
        logits[self._token_ids] = -np.inf


class BannedAtFirst:
    """Bans tokens as the first of an answer: Transformers' `SuppressTokensAtBeginLogitsProcessor`."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = np.asarray(token_ids, dtype=np.int64)
        self._has_begun = False

    def commit(self, token_ids: Sequence[int]) -> None:
        """Nothing is banned after the first token."""
        self._has_begun = self._has_begun or len(token_ids) > 0

    def apply(self, logits: Logits, prefix: Sequence[int]) -> None:
        """Change the logits in place."""
        if not self._has_begun and not prefix:
            logits[self._token_ids] = -np.inf


class OnlyTokens:
    """Bans all tokens but these."""

    def __init__(self, token_ids: Collection[int]) -> None:
        self._token_ids = np.array(sorted(token_ids), dtype=np.int64)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Nothing to remember."""

    def apply(self, logits: Logits, prefix: Sequence[int]) -> None:  # noqa: ARG002
        """Change the logits in place."""
        kept = logits[self._token_ids]
        logits[:] = -np.inf
        logits[self._token_ids] = kept


class Timestamps:
    """Timestamps come in pairs, ascend, begin and end the text, and win where they are likelier than any text.

    Source: openai/whisper, `decoding.py: ApplyTimestampRules`; Transformers' `WhisperTimeStampLogitsProcessor`. The
    last rule compares the probability of all timestamps with the likeliest other token's, so it needs whole rows.

    first: the token of 0.00 s, after which are all others. no_timestamps: the token that would mean none. eos: the
    lowest id that is no text. max_initial: how many tokens after `first` the first timestamp may be.
    """

    def __init__(self, first: int, no_timestamps: int, eos: int, max_initial: int) -> None:
        self._first, self._no_timestamps, self._eos, self._max_initial = first, no_timestamps, eos, max_initial
        self._answer: list[int] = []

    def commit(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the answer."""
        self._answer += token_ids

    def apply(self, logits: Logits, prefix: Sequence[int]) -> None:
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


def _ids(token_ids: set[int] | Mapping[int, float]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
