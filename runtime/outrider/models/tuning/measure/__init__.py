"""Measurements on this machine: what models' calls cost, alone and at the same time, and which rows are exact."""

from outrider.models.tuning.measure.cost import (
    ALONE,
    DRAFT_ROWS,
    LONGEST,
    MAIN_ROWS,
    NEAR,
    SHORT,
    Contention,
    PassCost,
    check_pass,
    contexts_of,
    measure_change,
    measure_pass,
    time_calls,
    timed_rows,
    timer,
)
from outrider.models.tuning.measure.exactness import (
    TRIAL_SEQUENCES,
    TRIAL_TOKENS,
    check_exactness,
    estimate_padding,
    has_groups,
    measure_exactness,
)
from outrider.models.tuning.measure.overlap import measure_contention, pays

__all__ = [
    "ALONE",
    "DRAFT_ROWS",
    "LONGEST",
    "MAIN_ROWS",
    "NEAR",
    "SHORT",
    "TRIAL_SEQUENCES",
    "TRIAL_TOKENS",
    "Contention",
    "PassCost",
    "check_exactness",
    "check_pass",
    "contexts_of",
    "estimate_padding",
    "has_groups",
    "measure_change",
    "measure_contention",
    "measure_exactness",
    "measure_pass",
    "pays",
    "time_calls",
    "timed_rows",
    "timer",
]
