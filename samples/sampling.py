"""One seed, one text: sampled answers do not depend on what drafts them.

python samples/sampling.py my-pair "Tell me about a rainy day."
"""

import sys

import outrider

if len(sys.argv) != 3:
    sys.exit(__doc__)
bundle, prompt = sys.argv[1:]
engine = outrider.load(bundle, temperature=0.8, top_p=0.95, max_new_tokens=60)

for seed in (1, 2):
    plain = engine.generate(prompt, seed=seed, drafter=None)
    print(f"seed {seed}: {plain.text}\n")
    for drafter in engine.drafters:
        drafted = engine.generate(prompt, seed=seed, drafter=drafter)
        print(f"drafted by {drafter}: same tokens: {drafted.token_ids == plain.token_ids}, {drafted.stats}")

# Where the same distribution is enough, and not the same text, more drafts are kept.
print(
    f"rejection sampling: {engine.generate(prompt, seed=1, sampling='rejection').stats.tokens_per_second:.1f} tokens/s"
)
