"""Decisions from a row's finite logits alone are those from the whole row."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import GenerationConfig
from outrider.drafters import Subset
from outrider.errors import DeviceError, NoTokenLeft
from outrider.tokens.sampling import LogitsSampler, argmax, probability, without
from outrider.types import ListedLogits, Logits, LogitsRow

VOCAB_SIZE, WHOLE_SIZE = 60, 200


def unread() -> Logits:
    raise AssertionError("the whole row was asked for")


def made_row(seed: int, spread: float, tied: bool, with_gaps: bool) -> Logits:
    rng = np.random.default_rng(seed)
    row = rng.normal(0, spread, VOCAB_SIZE).astype(np.float32)
    if tied:
        row = np.round(row)
    if with_gaps:
        row[rng.random(VOCAB_SIZE) < 0.3] = -np.inf
        row[0] = max(row[0], np.float32(-9))
    return row


rows = st.builds(made_row, st.integers(0, 2**20), st.sampled_from([0.3, 2.0, 9.0]), st.booleans(), st.booleans())
token_ids_of = st.lists(st.integers(0, WHOLE_SIZE - 1), max_size=6)
options_of = st.fixed_dictionaries(
    {
        "temperature": st.one_of(st.just(1.0), st.floats(0.05, 5)),
        "top_k": st.sampled_from([0, 0, 1, 3, 8, 20, 59, 60, 99]),
        "top_p": st.one_of(st.just(1.0), st.floats(0.05, 0.95)),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 0.8, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.0, -0.5, 1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3]),
        "logit_bias": st.dictionaries(st.integers(0, WHOLE_SIZE - 1), st.sampled_from([-100.0, -1.0, 2.0]), max_size=2),
        "banned_token_ids": token_ids_of.map(tuple),
        "no_repeat_ngram_size": st.sampled_from([0, 0, 1, 2]),
    }
)


@settings(max_examples=200)
@given(rows, options_of, token_ids_of, token_ids_of, st.integers(0, 99))
def test_decisions_are_those_of_the_whole_row(
    row: Logits, options: dict[str, Any], prompt: list[int], prefix: list[int], seed: int
) -> None:
    """The row of a cut output matrix, whose tokens are some of the whole vocabulary."""
    token_ids = np.sort(np.random.default_rng(seed).permutation(WHOLE_SIZE)[:VOCAB_SIZE])
    subset = Subset(token_ids.astype(np.int32), WHOLE_SIZE)
    cut = subset.row(LogitsRow.of(row))
    whole = LogitsRow.of(subset.widen(row).copy())
    sampler = LogitsSampler(GenerationConfig(**options), prompt)
    likeliest = argmax(whole)
    assert argmax(cut) == likeliest
    for token_id in (likeliest, *prompt):
        assert probability(cut, token_id) == pytest.approx(probability(whole, token_id), rel=1e-5)
    for listed, full in ((cut, whole), (without(cut, likeliest), without(whole, likeliest))):
        try:
            best, expected = sampler.best(full, prefix), sampler.distribution(full, prefix)
        except (NoTokenLeft, DeviceError) as error:
            for decide in (sampler.best, sampler.distribution):
                with pytest.raises(type(error)):
                    decide(listed, prefix)
            continue
        assert sampler.best(listed, prefix) == best
        assert sampler.best_several(listed, prefix, 3) == sampler.best_several(full, prefix, 3)
        made = sampler.distribution(listed, prefix)
        np.testing.assert_array_equal(made.token_ids, expected.token_ids)
        np.testing.assert_allclose(made.probs, expected.probs, rtol=1e-5)


def test_the_whole_row_is_not_read_without_need() -> None:
    logits = np.random.default_rng(0).normal(0, 3, 64_000).astype(np.float32)
    row = LogitsRow(unread, ListedLogits(np.arange(64_000), logits))
    options: dict[str, Any]
    for options in ({"top_p": 0.95}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.01}, {}):
        sampler = LogitsSampler(GenerationConfig(temperature=0.7, **options), [])
        expected = sampler.distribution(LogitsRow.of(logits), [])
        np.testing.assert_array_equal(sampler.distribution(row, []).probs, expected.probs)
        assert sampler.best(row, []) == logits.argmax()
    with pytest.raises(AssertionError, match="the whole row was asked for"):
        LogitsSampler(GenerationConfig(repetition_penalty=1.2), [1]).best(row, [])
