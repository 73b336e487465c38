"""What proposes tokens."""

from outrider.drafters.draft_model import DraftModel
from outrider.drafters.ngram import Ngram

__all__ = ["DraftModel", "Ngram"]
