"""From logits to tokens: sampling, verifiers and grammars.

Internal: apps import what docs/api.md lists.
"""
