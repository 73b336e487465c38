"""A draft model rides ahead, the main model checks. The counterpart of OpenVINO GenAI's speculative_decoding_lm.

python samples/draft_and_main.py my-pair "Write a quicksort in Python." --main-device GPU --draft-device CPU
"""

import argparse

import outrider

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("bundle", help="made by: outrider export MAIN --draft DRAFT -o my-pair")
parser.add_argument("prompt")
parser.add_argument("--main-device", default="CPU")
parser.add_argument("--draft-device", default="CPU")
parser.add_argument("--num-assistant-tokens", type=int, default=3, help="draft tokens a round")
args = parser.parse_args()

engine = outrider.load(args.bundle, main_device=args.main_device, draft_device=args.draft_device)
if "draft" not in engine.drafters:
    parser.error(f"{args.bundle} has no draft model. Export one with it: --draft DRAFT")
for chunk in engine.stream(
    args.prompt, drafter="draft", num_assistant_tokens=args.num_assistant_tokens, max_new_tokens=100
):
    print(chunk.text, end="", flush=True)

stats = chunk.stats
print(f"\n\n{stats.tokens_per_second:.1f} tokens/s, {stats.tokens_per_round:.2f} tokens a round")
print(f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens accepted ({stats.acceptance_rate:.0%})")
print(f"{stats.draft_seconds:.2f} s drafting, {stats.check_seconds:.2f} s checking")
