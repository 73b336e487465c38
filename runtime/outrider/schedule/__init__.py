"""Deciding what to draft: what calls cost, how likely tokens are to be kept, and what that is worth."""

from outrider.schedule import trial
from outrider.schedule.acceptance import Acceptance, Luck, Share
from outrider.schedule.auto import LONGEST, Auto
from outrider.schedule.cost import (
    ALONE,
    DRAFT_ROWS,
    MAIN_ROWS,
    Contention,
    PassCost,
    check_pass,
    contexts_of,
    measure_pass,
    time_calls,
)
from outrider.schedule.exactness import TRIAL_TOKENS, measure_exactness
from outrider.schedule.overlap import measure_contention, pays
from outrider.schedule.records import Record, Records
from outrider.schedule.rules import ConfidenceThreshold

__all__ = [
    "ALONE",
    "DRAFT_ROWS",
    "LONGEST",
    "MAIN_ROWS",
    "TRIAL_TOKENS",
    "Acceptance",
    "Auto",
    "ConfidenceThreshold",
    "Contention",
    "Luck",
    "PassCost",
    "Record",
    "Records",
    "Share",
    "check_pass",
    "contexts_of",
    "measure_contention",
    "measure_exactness",
    "measure_pass",
    "pays",
    "time_calls",
    "trial",
]
