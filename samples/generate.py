"""Answer one prompt.

python samples/generate.py my-pair "Why is the sky blue?"
"""

import sys

import outrider

if len(sys.argv) != 3:
    sys.exit(__doc__)
bundle, prompt = sys.argv[1:]
engine = outrider.load(bundle)
result = engine.generate(prompt, max_new_tokens=100)
print(result.text)
print(f"{result.stats.tokens_per_second:.1f} tokens/s, finished by {result.finish_reason}")
