"""Medians, spreads and confidence intervals of a few numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Student's t, two-sided 95%, for 1, 2, … degrees of freedom; the last one is used beyond.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


def median_and_range(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median, with the smallest and the largest."""
    return statistics.median(values), (min(values), max(values))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and third, by linear interpolation as NumPy's; of one value, itself twice."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, method="inclusive")
    return first, third


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """The geometric mean; None without ratios."""
    return statistics.geometric_mean(ratios) if ratios else None


def median_ratio(ratios: Sequence[float]) -> float | None:
    """The median on a logarithmic scale, which is robust against single slow runs; None without ratios."""
    return math.exp(statistics.median(map(math.log, ratios))) if ratios else None


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """A 95% confidence interval of the geometric mean, from repeats: Student's t of the logarithms.

    None for fewer than two repeats.
    """
    if len(ratios) < 2:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean, degrees = statistics.mean(logs), len(logs) - 1
    margin = _T[min(degrees, len(_T)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - margin), math.exp(mean + margin)
