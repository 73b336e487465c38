"""Chooses what to draft: how likely draft tokens are to be accepted, and what they cost."""

from outrider.drafters.controller.acceptance import Acceptance, Luck, Share
from outrider.drafters.controller.controller import KNOWN_TOKENS, Controller
from outrider.drafters.controller.fixed import Fixed
from outrider.drafters.controller.records import ModelRecord, Record, Records
from outrider.drafters.controller.replay import replay
from outrider.drafters.controller.rules import ConfidenceThreshold

__all__ = [
    "KNOWN_TOKENS",
    "Acceptance",
    "ConfidenceThreshold",
    "Controller",
    "Fixed",
    "Luck",
    "ModelRecord",
    "Record",
    "Records",
    "Share",
    "replay",
]
