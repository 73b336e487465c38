"""What proposes tokens."""

from outrider.drafters.draft_model import DraftModel
from outrider.drafters.ngram import Ngram
from outrider.drafters.translation import Dictionary
from outrider.drafters.vocabulary import Intersection, Text, Vocabulary, load_vocabulary

__all__ = ["Dictionary", "DraftModel", "Intersection", "Ngram", "Text", "Vocabulary", "load_vocabulary"]
