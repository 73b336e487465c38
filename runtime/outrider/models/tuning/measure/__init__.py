"""Measurements on this machine: what models' calls cost, alone and at the same time, and which rows are exact."""

from outrider.models.tuning.measure.exactness import (
    TRIAL_SEQUENCES,
    TRIAL_TOKENS,
    check_exactness,
    measure_exactness,
)
from outrider.models.tuning.measure.overlap import ALONE, Contention, measure_contention, pays

__all__ = [
    "ALONE",
    "TRIAL_SEQUENCES",
    "TRIAL_TOKENS",
    "Contention",
    "check_exactness",
    "measure_contention",
    "measure_exactness",
    "pays",
]
