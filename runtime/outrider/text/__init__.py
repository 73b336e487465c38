"""Between text and tokens."""

from outrider.text.stream import TextStream
from outrider.text.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer"]
