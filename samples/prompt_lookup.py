"""Drafts copied from the prompt: no draft model needed. Pays where the answer repeats the prompt.

python samples/prompt_lookup.py my-model "Correct the spelling: Teh quick brown fox jmups over the lazy dog."
"""

import sys

import outrider

if len(sys.argv) != 3:
    sys.exit(__doc__)
bundle, prompt = sys.argv[1:]
engine = outrider.load(bundle, drafter="ngram", num_assistant_tokens=5, max_ngram_size=3)
for chunk in engine.stream(prompt, max_new_tokens=100):
    print(chunk.text, end="", flush=True)
print(f"\n\n{chunk.stats.tokens_per_round:.2f} tokens a round, {chunk.stats.tokens_per_second:.1f} tokens/s")
