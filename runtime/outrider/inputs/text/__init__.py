"""Text to tokens and back."""

from outrider.inputs.text.stream import TextStream
from outrider.inputs.text.tokenizer import Tokenizer, check_tokenizer, pieces_of

__all__ = ["TextStream", "Tokenizer", "check_tokenizer", "pieces_of"]
