"""Conversions and comparisons that need PyTorch or openvino-genai's reader, each in a process of its own."""
