"""Chooses what to draft: how likely draft tokens are to be accepted, and what they cost."""

from outrider.controller import trial
from outrider.controller.acceptance import Acceptance, Luck, Share
from outrider.controller.controller import Controller
from outrider.controller.fixed import Fixed
from outrider.controller.records import ModelRecord, Record, Records
from outrider.controller.rules import ConfidenceThreshold

__all__ = [
    "Acceptance",
    "ConfidenceThreshold",
    "Controller",
    "Fixed",
    "Luck",
    "ModelRecord",
    "Record",
    "Records",
    "Share",
    "trial",
]
