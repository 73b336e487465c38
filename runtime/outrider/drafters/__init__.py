"""What proposes tokens."""

from outrider.drafters.draft_model import DraftModel
from outrider.drafters.ngram import Ngram
from outrider.drafters.translation import Dictionary
from outrider.drafters.vocabulary import Intersection, Subset, Text, Vocabulary, load_vocabulary

__all__ = ["Dictionary", "DraftModel", "Intersection", "Ngram", "Subset", "Text", "Vocabulary", "load_vocabulary"]
