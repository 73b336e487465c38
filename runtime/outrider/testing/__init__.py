"""Models for tests: small, random, and ready in milliseconds.

    from outrider.testing import FakeBackend, ToyTokenizer, save_toy_bundle

    bundle = save_toy_bundle(tmp_path)                       # a real main and draft model of 40 tokens
    engine = outrider.Engine(bundle, tokenizer=ToyTokenizer())
    engine.generate("abc", max_new_tokens=20).text

`save_toy_bundle` writes real decoders that go through the real backends; `FakeBackend` and `FakeHead`, a drafter that
reads hidden states, are NumPy alone. Their text is random, but every promise of Outrider can be checked on them.
"""

from outrider.testing.bundle import save_toy_bundle, save_toy_model
from outrider.testing.fake import FakeBackend, FakeSlot
from outrider.testing.fake_head import FakeHead
from outrider.testing.tokenizer import TOY_ALPHABET, ToyTokenizer, toy_tokens

__all__ = [
    "TOY_ALPHABET", "FakeBackend", "FakeHead", "FakeSlot", "ToyTokenizer", "save_toy_bundle", "save_toy_model",
    "toy_tokens",
]  # fmt: skip
