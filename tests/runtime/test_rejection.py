"""Rejection sampling gives the main model's distribution: in closed form, then sampled through the real loop."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outrider
from joint import CONFIG, sample_joint
from outrider.testing import ToyTokenizer, save_toy_bundle
from outrider.types import Distribution, Noise
from outrider_bench.verify.exact import chi_square_p_value
from toys import fix_costs

VOCAB_SIZE = 8


@st.composite
def distributions(draw: st.DrawFn) -> Distribution:
    """Any support, any probabilities, from nearly certain to nearly uniform."""
    token_ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, unique=True))
    weights = draw(st.lists(st.floats(1e-6, 1), min_size=len(token_ids), max_size=len(token_ids)))
    probs = np.array(weights)
    return Distribution(np.array(sorted(token_ids)), probs / probs.sum())


@given(distributions(), st.floats(0, 1, exclude_max=True))
def test_a_draw_inverts_the_cumulative_distribution(target: Distribution, uniform: float) -> None:
    token_id = target.draw(uniform)
    below = sum(target.prob(x) for x in range(token_id))
    assert below - 1e-12 <= uniform <= below + target.prob(token_id) + 1e-12


def test_rounds_and_purposes_have_noise_of_their_own() -> None:
    """Two decisions with the same number would not be independent (block-wise acceptance would be biased)."""
    noise = Noise(seed=7)
    keys = itertools.product(range(50), ("draft", "accept", "recover", "bonus"))
    numbers = np.concatenate([noise.uniforms(position, purpose, 3) for position, purpose in keys])
    assert len(np.unique(numbers)) == len(numbers)
    assert not np.isin(numbers, Noise(seed=8).uniforms(0, "draft", 100)).any()
    assert not np.isin(numbers, Noise(seed=7, sample=1).uniforms(0, "draft", 100)).any()


NUM_SAMPLES = 2000
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": None},
    "draft": {"drafter": "draft", "num_assistant_tokens": 3},
    "draft of one": {"drafter": "draft", "num_assistant_tokens": 1},  # a bonus token after an accepted one
    "auto": {"drafter": "auto"},
    "suffix": {"drafter": "suffix", "num_assistant_tokens": 3},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> outrider.Engine:
    bundle = save_toy_bundle(tmp_path_factory.mktemp("toy16"), vocab_size=16, draft_noise=0.15)
    engine = outrider.Engine(bundle, CONFIG, tokenizer=ToyTokenizer())
    fix_costs(engine, (0.040, 0.040), (0.0004, 0.0004))
    return engine


PROCESSORS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 5, "repetition_penalty": 1.3},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    {"temperature": 1.5, "typical_p": 0.8, "logit_bias": {3: 2}, "banned_token_ids": (5,)},
]
OTHERS = [("rejection", setting) for setting in SETTINGS if setting != "draft"]
OTHERS += [("token-rejection", "draft"), ("coupled", "draft")]
CASES = [
    *(("rejection", "draft", processors) for processors in PROCESSORS),
    # Processors do not depend on drafters. So other drafters and verifiers are tested with one of them each, in turn.
    *((*other, PROCESSORS[(i + 3) % len(PROCESSORS)]) for i, other in enumerate(OTHERS)),
]
QUICK = 2  # rejection sampling; the others are marked slow, and take half as many samples


@pytest.mark.parametrize(
    ("sampling", "setting", "processors"),
    [pytest.param(*case, marks=() if i == QUICK else pytest.mark.slow) for i, case in enumerate(CASES)],
    ids=str,
)
def test_samples_have_the_joint_distribution_of_the_main_model(
    toy: outrider.Engine, sampling: str, setting: str, processors: dict[str, Any]
) -> None:
    is_quick = CASES.index((sampling, setting, processors)) == QUICK
    num_samples = NUM_SAMPLES if is_quick else NUM_SAMPLES // 2
    p_value, stats = sample_joint(toy, num_samples, processors, sampling=sampling, **SETTINGS[setting])
    assert (sum(each.num_draft_tokens for each in stats) > num_samples / 4) == (setting != "plain")
    assert p_value > 1e-4


def test_the_chi_square_test_notices_a_biased_sampler() -> None:
    """Dropping a drawn token turns [.2, .5, .3] into [.28, .5, .22]."""
    exact: dict[tuple[int, ...], float] = {(0,): 0.2, (1,): 0.5, (2,): 0.3}
    rng = np.random.default_rng(0)
    biased = rng.multinomial(NUM_SAMPLES, [0.28, 0.5, 0.22])
    fair = rng.multinomial(NUM_SAMPLES, [0.2, 0.5, 0.3])
    assert chi_square_p_value({(i,): int(n) for i, n in enumerate(biased)}, exact) < 1e-6
    assert chi_square_p_value({(i,): int(n) for i, n in enumerate(fair)}, exact) > 1e-3


def test_a_seed_repeats_the_text_given_or_drawn(toy: outrider.Engine) -> None:
    first = toy.generate([1, 2, 3], temperature=1.0, max_new_tokens=20, seed=5)
    again = toy.generate([1, 2, 3], temperature=1.0, max_new_tokens=20, seed=5)
    other = toy.generate([1, 2, 3], temperature=1.0, max_new_tokens=20, seed=6)
    assert first.token_ids == again.token_ids != other.token_ids
    assert first.seed == 5
    drawn = toy.generate([1, 2, 3], temperature=1.0, max_new_tokens=20)
    assert toy.generate([1, 2, 3], temperature=1.0, max_new_tokens=20, seed=drawn.seed).token_ids == drawn.token_ids
    assert toy.generate([1, 2, 3], max_new_tokens=2).seed is None
