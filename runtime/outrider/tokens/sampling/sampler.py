"""All processors of one sequence, in their order."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.config import GenerationConfig
from outrider.errors import DeviceError, NoTokenLeft
from outrider.tokens.sampling.processors import BannedTokens, LogitBias, MinNewTokens, NoRepeatNgram, Penalties
from outrider.tokens.sampling.truncate import ranked, truncated_softmax
from outrider.types import Distribution, Logits, LogitsRow, TokenLogprobs


class Processor(Protocol):
    """One processing step for logits."""

    def commit(self, token_ids: Sequence[int]) -> None:
        """Add committed tokens to the state."""

    def apply(self, logits: Logits, prefix: Sequence[int]) -> None:
        """Change the logits in place. `prefix` follows the committed tokens."""


class LogitsSampler:
    """Turns rows of logits of one sequence into a token or a distribution.

    Rows are not changed. A token with a logit of −inf is never chosen.

    end_token_ids: the tokens that end an answer, which `min_new_tokens` bans. grammar: bans what may not follow.
    rules: of the model itself, which only ban tokens. budget: of the model's reasoning, which comes last.

    Raises:
        DeviceError: when a row has no finite maximum, which only broken weights or a broken driver produce.
        NoTokenLeft: when the options ban every token that a row has.
    """

    def __init__(
        self,
        config: GenerationConfig,
        prompt_token_ids: Sequence[int],
        *,
        end_token_ids: Collection[int] = (),
        grammar: Processor | None = None,
        rules: Sequence[Processor] = (),
        budget: Processor | None = None,
    ) -> None:
        self._config = config
        self._processors: list[Processor] = []
        if config.logit_bias:
            self._processors.append(LogitBias(config.logit_bias))
        if (penalties := Penalties(config, prompt_token_ids)).active:
            self._processors.append(penalties)
        if config.no_repeat_ngram_size:
            self._processors.append(NoRepeatNgram(config.no_repeat_ngram_size, prompt_token_ids))
        if config.min_new_tokens:
            self._processors.append(MinNewTokens(config.min_new_tokens, end_token_ids))
        if config.banned_token_ids:
            self._processors.append(BannedTokens(config.banned_token_ids))
        if grammar is not None:
            self._processors.append(grammar)
        self._processors += rules
        if budget is not None:
            self._processors.append(budget)

    @property
    def is_stateless(self) -> bool:
        """Whether committed tokens change nothing: there are no processors."""
        return not self._processors

    def best(self, row: LogitsRow, prefix: Sequence[int]) -> int:
        """The token with the highest processed logit; the lowest id among equals."""
        token_ids, logits = row.finite()
        best = _finite_argmax(logits, token_ids)
        if self._processors:
            best = int(self._process_finite(row, prefix).argmax())
        return best if token_ids is None else int(token_ids[best])

    def best_several(self, row: LogitsRow, prefix: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens with the highest processed logits, `best` first; as many as the row has."""
        token_ids, processed = self._processed(row, prefix)
        found = ranked(processed, count)
        return [int(token_id) for token_id in (found if token_ids is None else token_ids[found])]

    def distribution(self, row: LogitsRow, prefix: Sequence[int]) -> Distribution:
        """The probabilities after all processors."""
        config = self._config
        options = config.temperature, config.top_k, config.top_p, config.min_p, config.typical_p
        token_ids, processed = self._processed(row, prefix)
        made = truncated_softmax(processed, *options)
        return made if token_ids is None else Distribution(token_ids[made.token_ids], made.probs)

    def logprobs(self, row: LogitsRow, prefix: Sequence[int], token_id: int) -> TokenLogprobs:
        """The log-probabilities for a token that was chosen at this row, by the options `logprobs` and `logprobs_of`.

        "unprocessed": from the log-softmax of the row. "processed": from `distribution`, or when greedy from the
        log-softmax of the processed logits. vLLM calls them raw_logprobs and processed_logprobs (`--logprobs-mode`).
        The normaliser of a log-softmax is exact, which takes the whole row.
        """
        config, count = self._config, self._config.logprobs or 0
        if config.logprobs_of == "unprocessed":
            return logprobs_of_logits(row.full(), token_id, count)
        if config.temperature == 0:
            return logprobs_of_logits(self._process(row.full(), prefix), token_id, count)
        return logprobs_of_distribution(self.distribution(row, prefix), token_id, count)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Add committed tokens to the processors' state."""
        for processor in self._processors:
            processor.commit(token_ids)

    def _processed(self, row: LogitsRow, prefix: Sequence[int]) -> tuple[NDArray[np.int64] | None, Logits]:
        """The tokens int64 [n] with a finite logit, ascending, and their processed logits; None: all tokens."""
        token_ids, logits = row.finite()
        _finite_argmax(logits, token_ids)
        return token_ids, self._process_finite(row, prefix) if self._processors else logits

    def _process_finite(self, row: LogitsRow, prefix: Sequence[int]) -> Logits:
        """The processed logits of the tokens of `LogitsRow.finite`. Processors see the whole row."""
        processed = self._process(row.full(), prefix)
        return processed if row.listed is None else processed[row.listed.token_ids]

    def _process(self, logits: Logits, prefix: Sequence[int]) -> Logits:
        """The processed logits: a copy, unless there is nothing to do."""
        if not self._processors:
            return logits
        logits = logits.copy()
        for processor in self._processors:
            processor.apply(logits, prefix)
        if logits.max() == -np.inf:
            raise NoTokenLeft(
                "The request's options ban all tokens that the model gives here, by "
                "banned_token_ids, no_repeat_ngram_size, min_new_tokens or a grammar. Ban fewer of them.",
                row=len(prefix),
            )
        return logits


def _finite_argmax(logits: Logits, token_ids: NDArray[np.int64] | None) -> int:
    """The index of the maximum, which is the first NaN, if there is one. token_ids: as in `LogitsRow.finite`."""
    highest = int(logits.argmax())
    if not math.isfinite(logits[highest]):
        token_id = highest if token_ids is None else int(token_ids[highest])
        raise DeviceError(
            f"The model's logits are not finite ({logits[highest]} for token {token_id}). Check the bundle with "
            "'outrider inspect --check', or compute in precision='f32'."
        )
    return highest


def logprobs_of_logits(logits: Logits, token_id: int, count: int) -> TokenLogprobs:
    """From the log-softmax of float32 logits [vocab_size], in double precision. Tokens at −inf are never in `top`."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    log_total = np.log(np.exp(shifted).sum())
    top = _largest(logits, min(count, int(np.count_nonzero(logits > -np.inf))))
    return TokenLogprobs(
        token_id, float(shifted[token_id] - log_total), tuple((i, float(shifted[i] - log_total)) for i in top)
    )


def logprobs_of_distribution(distribution: Distribution, token_id: int, count: int) -> TokenLogprobs:
    """From a distribution. `top` has fewer than `count` tokens if fewer have a probability above 0."""
    logprobs = np.log(distribution.probs)
    top = _largest(distribution.probs, min(count, len(logprobs)))
    chosen = float(np.log(distribution.prob(token_id)))
    return TokenLogprobs(token_id, chosen, tuple((int(distribution.token_ids[i]), float(logprobs[i])) for i in top))


def _largest(values: NDArray[np.floating], count: int) -> list[int]:
    """The indices of the `count` largest values, the largest first; among equals the lower index first."""
    if not count:
        return []
    smallest = np.partition(values, len(values) - count)[len(values) - count]
    indices = np.flatnonzero(values >= smallest)
    order = np.lexsort((indices, -values[indices]))[:count]
    return [int(index) for index in indices[order]]
