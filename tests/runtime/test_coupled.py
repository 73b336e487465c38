"""Coupled sampling: one text per seed with any drafter, its noise, and how often draft and main model agree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.types import Noise

pytestmark = pytest.mark.any_format

TOKEN_IDS = st.lists(st.integers(0, 2**17), min_size=1, max_size=50, unique=True).map(sorted)


def splitmix64(start: int, index: int) -> int:
    """The number at `index` of a SplitMix64 sequence, in plain integers (Steele et al. 2014, figure 17)."""
    word = 2**64 - 1
    z = start + (index + 1) * 0x9E3779B97F4A7C15 & word
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & word
    z = (z ^ z >> 27) * 0x94D049BB133111EB & word
    return z ^ z >> 31


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20), TOKEN_IDS)
def test_gumbel_noise_by_definition(seed: int, position: int, token_ids: list[int]) -> None:
    import zlib

    counter = (position << 128) + (zlib.crc32(b"gumbel") << 64)
    start = int(np.random.Philox(key=seed, counter=counter).random_raw(1)[0])
    uniforms = np.array([((splitmix64(start, i) >> 11) + 0.5) * 2.0**-53 for i in token_ids])
    made = Noise(seed).gumbel(position, np.array(token_ids))
    np.testing.assert_allclose(made, -np.log(-np.log(uniforms)), rtol=1e-12)
    assert np.isfinite(made).all()


@given(TOKEN_IDS, st.integers(0, 2**17))
def test_a_tokens_noise_does_not_depend_on_the_others(token_ids: list[int], position: int) -> None:
    alone = [float(Noise(3).gumbel(position, np.array([i]))[0]) for i in token_ids]
    assert Noise(3).gumbel(position, np.array(token_ids)).tolist() == alone


def test_gumbel_noise_is_gumbel_distributed() -> None:
    noise = np.concatenate([Noise(1).gumbel(position, np.arange(1000)) for position in range(100)])
    ordered = np.sort(np.exp(-np.exp(-noise)))  # uniform numbers, if the noise is correct
    distance = np.abs(ordered - (np.arange(len(ordered)) + 0.5) / len(ordered)).max()
    assert distance < 1.95 / len(ordered) ** 0.5  # Kolmogorov and Smirnov, false alarm 1e-3, seeds fixed
    by_position = noise.reshape(100, 1000)
    assert abs(np.corrcoef(by_position[:-1].ravel(), by_position[1:].ravel())[0, 1]) < 0.02


def test_noise_is_the_same_everywhere() -> None:
    """Every platform and version must give these numbers, so that a seed always gives the same text."""
    noise = Noise(2026, 1)
    assert noise.uniforms(17, "draft", 3).tolist() == [0.2679118628022744, 0.12524462885685483, 0.34364188687580355]
    gumbel = noise.gumbel(17, np.array([0, 1, 151_642]))
    np.testing.assert_allclose(gumbel, [0.3276317298945109, 0.5574381510585459, 1.4574994153455454], rtol=1e-14)
