"""Exports encoder-decoder models: T5, Whisper and MarianMT. See docs/encoder-decoder.md."""
