"""Text to tokens and back."""

from outrider.text.stream import TextStream
from outrider.text.tokenizer import Tokenizer, check_tokenizer

__all__ = ["TextStream", "Tokenizer", "check_tokenizer"]
