"""Exports encoder-decoder models: T5 and Whisper. See docs/encoder-decoder.md."""
