"""Tokenizers of checkpoints and GGUF files, their vocabularies and special tokens."""
