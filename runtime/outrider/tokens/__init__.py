"""From logits to tokens: sampling, verifiers and grammars."""
