"""Compares samples with the exact distribution, which is enumerated."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from outrider.config import GenerationConfig
from outrider.engine.engine import Engine
from outrider.models.tuning.measure.readings import read
from outrider.tokens.sampling import LogitsSampler
from outrider.types import LogitsRow


def exact_joint(
    engine: Engine, prompt: list[int], config: GenerationConfig, num_tokens: int
) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `num_tokens` tokens, from the main model's own logits."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer = {}
        for start, probability in joint.items():
            context = [*prompt, *start]
            logits = read(engine.main, context, [len(context)], 1)[-1]
            row = LogitsSampler(config, prompt).distribution(LogitsRow.of(logits), start)
            for token_id, p in zip(row.token_ids.tolist(), row.probs.tolist(), strict=True):
                if probability * p > 1e-9:
                    longer[(*start, token_id)] = probability * p
        joint = longer
    return joint


def chi_square_p_value(counts: Mapping[tuple[int, ...], int], exact: Mapping[tuple[int, ...], float]) -> float:
    """Pearson's test. Cells expected fewer than five times are pooled. 0 if an impossible sample was drawn.

    Upper tail by Wilson and Hilferty's approximation (1931).
    """
    if not set(counts) <= set(exact):
        return 0.0
    total = sum(counts.values())
    pairs = [(counts.get(cell, 0), total * probability) for cell, probability in exact.items()]
    cells = [pair for pair in pairs if pair[1] >= 5]
    rest = [pair for pair in pairs if pair[1] < 5]
    pooled = (sum(count for count, _ in rest), sum(expected for _, expected in rest))
    if pooled[1] >= 5:
        cells.append(pooled)
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    degrees = len(cells) - 1
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    return 0.5 * math.erfc(z / 2**0.5)


def total_variation(counts: Mapping[tuple[int, ...], int], exact: Mapping[tuple[int, ...], float]) -> float:
    """Half the sum of absolute differences between observed shares and probabilities."""
    total = sum(counts.values())
    cells = set(counts) | set(exact)
    return 0.5 * sum(abs(counts.get(cell, 0) / total - exact.get(cell, 0.0)) for cell in cells)


def expected_total_variation(exact: Mapping[tuple[int, ...], float], num_samples: int) -> float:
    """The mean of `total_variation` for exact samples. It is above 0, and falls with their number."""
    probs = np.array(list(exact.values()))
    rng = np.random.default_rng(0)
    draws = rng.multinomial(num_samples, probs / probs.sum(), size=50)
    return float(0.5 * np.abs(draws / num_samples - probs).sum(axis=1).mean())
