"""Print an answer as it comes, sampled with a seed.

python samples/stream.py my-pair "Write a short story about a lighthouse."
"""

import sys

import outrider

if len(sys.argv) != 3:
    sys.exit(__doc__)
bundle, prompt = sys.argv[1:]
engine = outrider.load(bundle)
messages = [{"role": "user", "content": prompt}]
for chunk in engine.stream(messages, max_new_tokens=100, temperature=0.7, top_p=0.9, seed=1):
    print(chunk.text, end="", flush=True)
print(f"\n\n{chunk.stats.tokens_per_second:.1f} tokens/s")
