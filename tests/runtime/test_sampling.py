"""Processors against a plain reading of their definitions, and against Transformers' own."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import GenerationConfig
from outrider.tokens.sampling import LogitsSampler
from outrider.tokens.sampling.truncate import truncated_softmax
from outrider.types import LogitsRow

VOCAB_SIZE = 50
logits_rows = st.integers(0, 2**20).map(
    lambda seed: np.random.default_rng(seed).normal(0, 3, VOCAB_SIZE).astype(np.float32)
)
# A coarse grid, so that rows have ties.
tied_rows = logits_rows.map(np.round)
truncations = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.05, 5),
        "top_k": st.integers(0, VOCAB_SIZE + 5),
        "top_p": st.floats(0.05, 1),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    }
)


def by_definition(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Sort everything, step by step, in double precision."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))
    if 0 < top_k < len(logits):
        order = [i for i in order if scaled[i] >= scaled[order[top_k - 1]]]
    weights = {i: float(np.exp(scaled[i] - scaled[order[0]])) for i in order}
    if top_p < 1:
        total, mass, kept = sum(weights.values()), 0.0, []
        for i in order:
            kept.append(i)
            mass += weights[i]
            if mass >= top_p * total:
                break
        order = kept
    order = [i for i in order if weights[i] >= min_p]
    total = sum(weights[i] for i in order)
    return {i: weights[i] / total for i in order}


@settings(max_examples=300)
@given(st.one_of(logits_rows, tied_rows), truncations)
def test_truncation_by_definition(logits: np.ndarray, options: dict[str, Any]) -> None:
    made = truncated_softmax(logits, **options)
    expected = by_definition(logits, **options)
    assert (np.diff(made.token_ids) > 0).all()
    assert made.probs.sum() == pytest.approx(1, abs=1e-12)
    # A token at the very edge of a threshold may fall on either side by rounding: single precision here.
    for i in set(expected) ^ set(made.token_ids.tolist()):
        edge = expected.get(i, made.prob(i))
        assert edge < 1e-12 or is_at_an_edge(logits, options, i)
    if set(expected) == set(made.token_ids.tolist()):
        assert {i: made.prob(i) for i in expected} == pytest.approx(expected, rel=1e-4)


def is_at_an_edge(logits: np.ndarray, options: dict[str, Any], token_id: int) -> bool:
    """Whether a change of a threshold in the sixth digit decides about the token."""
    kept = [
        token_id in by_definition(logits, **options | {"top_p": options["top_p"] * p, "min_p": options["min_p"] * m})
        for p in (1 - 1e-6, min(1 + 1e-6, 1 / options["top_p"]))
        for m in (1 - 1e-5, 1 + 1e-5)
    ]
    return any(kept) and not all(kept)


@pytest.mark.parametrize("top_k", [1, 5, 50, 500, 1187, 1188, 151_935])
@pytest.mark.parametrize("kind", ["spread", "tied", "rising", "gaps"])
def test_the_early_cut_of_top_k_drops_no_kept_token_at_a_real_vocabulary(top_k: int, kind: str) -> None:
    logits: Any = np.random.default_rng(0).normal(0, 2, 151_936).astype(np.float32)
    if kind == "tied":
        logits = np.round(2 * logits)
    if kind == "rising":  # the highest stand together, after the last whole part
        logits = np.arange(151_936, dtype=np.float32) / 9999
    if kind == "gaps":
        logits[100:] = -np.inf
    made = truncated_softmax(logits, 1.0, top_k, 1.0, 0.0)
    expected = np.flatnonzero((logits >= np.sort(logits)[-top_k]) & (logits > -np.inf))
    np.testing.assert_array_equal(made.token_ids, expected)


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e3, 1e30])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = np.array([-1000, 0, 3, 3, 50], dtype=np.float32)
    with np.errstate(all="raise", under="ignore"):
        made = truncated_softmax(logits, temperature, 0, 1.0, 0.0)
    assert made.probs.sum() == pytest.approx(1)
    assert made.prob(4) == made.probs.max()


@given(tied_rows)
def test_greedy_takes_the_lowest_id_among_equals(logits: np.ndarray) -> None:
    best = LogitsSampler(GenerationConfig(), []).best(LogitsRow.of(logits), [])
    assert best == min(i for i in range(VOCAB_SIZE) if logits[i] == logits.max())
