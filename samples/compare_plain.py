"""The same request with and without speculation: the same tokens, at two speeds.

python samples/compare_plain.py my-pair "Write a function that reverses a string."
"""

import sys

import outrider

if len(sys.argv) != 3:
    sys.exit(__doc__)
bundle, prompt = sys.argv[1:]
engine = outrider.load(bundle)
for drafter in ("auto", None):  # once to warm up
    engine.generate(prompt, drafter=drafter, max_new_tokens=16)

speculative = engine.generate(prompt, max_new_tokens=100)
plain = engine.generate(prompt, max_new_tokens=100, drafter=None)

print(speculative.text)
print(f"same tokens: {speculative.token_ids == plain.token_ids}")
print(f"plain {plain.stats.tokens_per_second:.1f}, speculative {speculative.stats.tokens_per_second:.1f} tokens/s")
