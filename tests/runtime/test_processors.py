"""Logits processors, compared with their definitions and with Transformers', and at their limits."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import GenerationConfig
from outrider.errors import DeviceError, NoTokenLeft
from outrider.tokens.sampling import LogitsSampler
from outrider.tokens.sampling.truncate import truncated_softmax
from outrider.types import LogitsRow

VOCAB_SIZE = 30
END = (VOCAB_SIZE - 1, VOCAB_SIZE - 2)  # what ends an answer, where something does


@st.composite
def logits_rows(draw: st.DrawFn) -> np.ndarray:
    """Any logits; some rows have fewer tokens, as a drafter's may."""
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    logits = rng.normal(0, 3, VOCAB_SIZE).astype(np.float32)
    missing = draw(st.sampled_from([0, 0, 3, 20]))
    logits[rng.permutation(VOCAB_SIZE)[:missing]] = -np.inf
    return logits


token_ids = st.integers(0, VOCAB_SIZE - 1)
# Few different ones, so that n-grams come up again.
tokens = st.lists(st.integers(0, 3), max_size=12)
processors = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=3),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "presence_penalty": st.sampled_from([-0.5, 1.0]),
        "frequency_penalty": st.just(0.3),
        "no_repeat_ngram_size": st.integers(1, 4),
        "min_new_tokens": st.integers(1, 12),
        "banned_token_ids": st.lists(token_ids, max_size=5),
    },
)
truncations = st.fixed_dictionaries(
    {"temperature": st.floats(0.2, 5)},
    optional={
        "top_k": st.integers(1, VOCAB_SIZE),
        "top_p": st.floats(0.1, 0.99),
        "min_p": st.sampled_from([0.02, 0.3]),
        "typical_p": st.floats(0.05, 0.99),
    },
)


def by_definition(logits: np.ndarray, options: dict[str, Any], prompt: list[int], answer: list[int]) -> np.ndarray:
    """Apply the definitions step by step, in double precision, to all tokens so far."""
    made = logits.astype(np.float64)
    for token_id, bias in options.get("logit_bias", {}).items():
        made[token_id] += bias
    for token_id in {*prompt, *answer}:
        penalty = options.get("repetition_penalty", 1)
        made[token_id] = made[token_id] / penalty if made[token_id] > 0 else made[token_id] * penalty
    for token_id, count in Counter(answer).items():
        made[token_id] -= options.get("presence_penalty", 0) + options.get("frequency_penalty", 0) * count
    text = [*prompt, *answer]
    if n := options.get("no_repeat_ngram_size"):
        ngrams = {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}
        for token_id in range(VOCAB_SIZE):
            if tuple([*text, token_id][-n:]) in ngrams:
                made[token_id] = -np.inf
    if len(answer) < options.get("min_new_tokens", 0):
        made[list(END)] = -np.inf
    made[options.get("banned_token_ids", [])] = -np.inf
    return made


def sampler_of(options: dict[str, Any], prompt: list[int]) -> LogitsSampler:
    return LogitsSampler(GenerationConfig(**options), prompt, end_token_ids=END)


@settings(max_examples=400)
@given(logits_rows(), processors, tokens, tokens, tokens)
def test_processors_by_definition(
    logits: np.ndarray, options: dict[str, Any], prompt: list[int], answer: list[int], prefix: list[int]
) -> None:
    """A row depends on prompt, answer and the draft tokens before it. The model's own row does not change."""
    sampler = sampler_of({"temperature": 1.0} | options, prompt)
    for token_id in answer:
        sampler.commit([token_id])
    before = logits.copy()
    expected = by_definition(logits, options, prompt, [*answer, *prefix])
    if expected.max() == -np.inf:
        for choose in (sampler.best, sampler.distribution):
            with pytest.raises(NoTokenLeft, match="ban all tokens that the model gives") as error:
                choose(LogitsRow.of(logits), prefix)
            assert error.value.row == len(prefix)
        return
    made = sampler.distribution(LogitsRow.of(logits), prefix)
    probs = np.exp(expected - expected.max())
    probs /= probs.sum()
    np.testing.assert_allclose([made.prob(i) for i in range(VOCAB_SIZE)], probs, rtol=1e-4, atol=1e-30)
    assert expected[sampler.best(LogitsRow.of(logits), prefix)] >= expected.max() - 1e-4
    np.testing.assert_array_equal(logits, before)


@settings(max_examples=200)
@given(logits_rows(), processors, truncations, tokens, st.lists(tokens, max_size=3), tokens)
def test_rejected_tokens_leave_no_trace(
    logits: np.ndarray,
    options: dict[str, Any],
    truncation: dict[str, Any],
    prompt: list[int],
    rounds: list[list[int]],
    rejected: list[int],
) -> None:
    """Rounds with rejected tokens give the same as plain decoding, token by token."""
    plain, used = (sampler_of(options | truncation, prompt) for _ in range(2))
    for committed in rounds:
        for i in range(len(rejected) + 1):
            outcome(used, logits, rejected[:i])
        for i, token_id in enumerate(committed):
            assert outcome(used, logits, committed[:i]) == outcome(plain, logits, [])
            plain.commit([token_id])
        used.commit(committed)
    assert outcome(used, logits, []) == outcome(plain, logits, [])


def outcome(sampler: LogitsSampler, logits: np.ndarray, prefix: list[int]) -> Any:
    """All results of a row, bit for bit."""
    try:
        made = sampler.distribution(LogitsRow.of(logits), prefix)
        return made.token_ids.tolist(), made.probs.tolist(), sampler.best(LogitsRow.of(logits), prefix)
    except NoTokenLeft:
        return None


def typical_by_definition(probs: np.ndarray, typical_p: float) -> list[int]:
    """Sort by |−log p − entropy|, and take tokens until their mass reaches typical_p."""
    entropy = -(probs * np.log(probs)).sum()
    order = np.argsort(np.abs(-np.log(probs) - entropy), kind="stable")
    num_kept = int((np.cumsum(probs[order]) < typical_p).sum()) + 1
    return sorted(order[:num_kept].tolist())


@pytest.mark.parametrize("temperature", [0.3, 1.0, 30.0])
@pytest.mark.parametrize("typical_p", [0.01, 0.2, 0.9, 0.9999])
def test_typical_p_at_a_real_vocabulary(temperature: float, typical_p: float) -> None:
    """The early cut drops no token that would have been kept, from a peaked row to a flat one."""
    logits = np.random.default_rng(0).normal(0, 2, 151_936).astype(np.float32)
    whole = truncated_softmax(logits, temperature, 0, 1.0, 0.0)
    made = truncated_softmax(logits, temperature, 0, 1.0, 0.0, typical_p)
    assert made.token_ids.tolist() == whole.token_ids[typical_by_definition(whole.probs, typical_p)].tolist()
    assert made.probs.sum() == pytest.approx(1, abs=1e-12)


def test_the_early_cut_of_typical_p_spares_what_is_rare_but_nearer_than_the_likeliest() -> None:
    logits = np.log(np.array([0.3] + [0.68 / 800] * 800 + [0.02 / 199] * 199)).astype(np.float32)
    assert truncated_softmax(logits, 1.0, 0, 1.0, 0.0, 0.69).token_ids.tolist() == list(range(1, 1000))


def test_typical_p_keeps_what_is_as_near_as_the_last() -> None:
    made = truncated_softmax(np.zeros(8, dtype=np.float32), 1.0, 0, 1.0, 0.0, 0.3)
    assert len(made.token_ids) == 8
    certain = np.full(8, -np.inf, dtype=np.float32)
    certain[5] = 1
    assert truncated_softmax(certain, 1.0, 0, 1.0, 0.0, 0.3).token_ids.tolist() == [5]


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_broken_rows_are_the_models_fault(broken: float) -> None:
    """Whatever is banned, the model's own row is checked first."""
    logits = np.full(VOCAB_SIZE, broken, dtype=np.float32)
    for options in ({}, {"banned_token_ids": list(range(VOCAB_SIZE))}):
        sampler = sampler_of({"temperature": 1.0} | options, [])
        for choose in (sampler.best, sampler.distribution):
            with pytest.raises(DeviceError, match="not finite"):
                choose(LogitsRow.of(logits), [])
