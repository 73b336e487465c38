"""Measures decoding in several modes, within one run, on the same prompts."""
