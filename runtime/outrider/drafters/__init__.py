"""Drafters: they propose tokens.

Internal: apps import what docs/api.md lists.
"""

from outrider.drafters.assistant_model import AssistantModel
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.hidden_model import HiddenModel
from outrider.drafters.markov import MarkovHead
from outrider.drafters.ngram import Ngram
from outrider.drafters.references import References
from outrider.drafters.self_model import SelfModel
from outrider.drafters.store import AnswerStore
from outrider.drafters.suffix import Suffix
from outrider.drafters.translation import TokenMap
from outrider.drafters.vocabulary import DraftVocabulary, Intersection, Subset, Text, load_vocabulary

__all__ = [
    "AnswerStore", "AssistantModel", "DraftModel", "DraftVocabulary", "HiddenModel", "Intersection", "MarkovHead",
    "Ngram", "References", "SelfModel", "Subset", "Suffix", "Text", "TokenMap", "load_vocabulary",
]  # fmt: skip
