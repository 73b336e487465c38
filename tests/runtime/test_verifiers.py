"""The verifiers' output distributions, to 1e-12: each accept test is followed both ways."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider
from draft_laws import Models, output_law, plain_law
from enumeration import largest_difference
from outrider.config import LOSSY, SAMPLING
from outrider.errors import RequestError
from outrider.tokens.verifiers import SAMPLING_VERIFIERS, BlockRejection, Threshold, TokenRejection, Typical
from outrider.types import Distribution, Draft, LogitsRow, Noise

pytestmark = pytest.mark.any_format

CHAIN = [-1, 0, 1]
MODELS = st.builds(Models, st.integers(0, 2**31), st.sampled_from([0.3, 1.0, 3.0]), gaps=st.sampled_from([0.0, 0.25]))


@settings(max_examples=25)
@given(MODELS, st.booleans())
def test_rejection_sampling_gives_the_main_models_joint_distribution(models: Models, certain: bool) -> None:
    """Sun et al. 2024, theorem 1, for drafts that may end anywhere; and theorem 2: no fewer tokens are accepted."""
    plain = plain_law(models, 4)
    by_token, kept_by_token = output_law(TokenRejection(), models, CHAIN, certain, 4)
    by_block, kept_by_block = output_law(BlockRejection(), models, CHAIN, certain, 4)
    assert largest_difference(by_token, plain) < 1e-12
    assert largest_difference(by_block, plain) < 1e-12
    assert kept_by_block > kept_by_token - 1e-12


def test_block_verification_keeps_more_tokens() -> None:
    """The example of Sun et al. 2024, section 2: target [1/3, 2/3], draft [2/3, 1/3], two tokens: 10/9 against 11/9."""

    class Constant(Models):
        def row(self, role: int, context: Any) -> LogitsRow:
            return LogitsRow.of(np.log([[1, 2], [2, 1]][role]).astype(np.float32))

    models = Constant(0, vocab_size=2)
    assert output_law(TokenRejection(), models, CHAIN[:2], False, 3)[1] == pytest.approx(10 / 9, abs=1e-6)
    assert output_law(BlockRejection(), models, CHAIN[:2], False, 3)[1] == pytest.approx(11 / 9, abs=1e-6)


def one_token_law(verifier: Any, models: Models) -> np.ndarray:
    """The law float64 [3] of the first token of a round with a draft of one token."""
    law = np.zeros(3)
    for (first, *_), p in output_law(verifier, models, CHAIN[:1], False, 1)[0].items():
        law[first] += p
    return law


def dense(row: Distribution | None) -> np.ndarray:
    assert row
    probs = np.zeros(3)
    probs[row.token_ids] = row.probs
    return probs


NOISY_MODELS = st.builds(Models, st.integers(0, 2**31), st.sampled_from([0.3, 1.0, 3.0]))


@settings(max_examples=50)
@given(NOISY_MODELS, st.floats(0.01, 1))
def test_threshold_by_definition(models: Models, threshold: float) -> None:
    """The error is the excess probability of accepted tokens. It is 0 at threshold 1."""
    target, drafted = dense(models.distribution(0, ())), dense(models.distribution(1, ()))
    kept = drafted * (target >= threshold * drafted)
    distance = np.abs(one_token_law(Threshold(threshold), models) - target).sum() / 2
    assert distance == pytest.approx(np.maximum(kept - target, 0).sum(), abs=1e-12)
    exact = one_token_law(Threshold(1.0), models)
    np.testing.assert_allclose(exact, target, atol=1e-12)


@settings(max_examples=50)
@given(NOISY_MODELS, st.floats(0.01, 1))
def test_typical_by_definition(models: Models, threshold: float) -> None:
    target, drafted = dense(models.distribution(0, ())), dense(models.distribution(1, ()))
    entropy = -sum(p * np.log(p) for p in target if p)
    kept = drafted * (target > min(threshold, threshold**0.5 * np.exp(-entropy)))
    expected = kept + (1 - kept.sum()) * target
    np.testing.assert_allclose(one_token_law(Typical(threshold), models), expected, atol=1e-12)


@pytest.mark.parametrize("name", LOSSY)
def test_a_tree_is_refused_by_verifiers_of_chains(name: str) -> None:
    verifier: Any = SAMPLING_VERIFIERS[name]()
    draft = Draft([1, 2], parents=[-1, -1])
    with pytest.raises(RequestError, match=rf"parents=\[-1, -1\]\), and {type(verifier).__name__} reads chains only"):
        verifier.verify(draft, Models(0).rows_of(draft), Noise(0), 0)


def test_every_sampling_mode_has_a_verifier_and_says_whether_it_is_lossless() -> None:
    assert list(SAMPLING_VERIFIERS) == list(SAMPLING)
    for name, make in SAMPLING_VERIFIERS.items():
        assert make().lossless == make().trees == (name not in LOSSY)
        assert ((make().__doc__ or "").startswith("Lossy")) == (name in LOSSY)
        assert ("LOSSY" in SAMPLING[name]) == (name in LOSSY)


@pytest.mark.parametrize("sampling", LOSSY)
def test_lossy_answers_say_so(toy_engine: outrider.Engine, sampling: str) -> None:
    options: dict[str, Any] = {
        "temperature": 1.0, "max_new_tokens": 30, "seed": 0, "ignore_eos": True, "num_assistant_tokens": 3,
    }  # fmt: skip
    lossy = toy_engine.generate("abc", sampling=sampling, acceptance_threshold=0.01, **options)
    exact = toy_engine.generate("abc", sampling="rejection", **options)
    assert not lossy.lossless
    assert lossy.as_dict()["lossless"] is False
    assert exact.lossless
    assert lossy.stats.acceptance_rate > exact.stats.acceptance_rate
