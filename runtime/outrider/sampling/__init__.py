"""From logits to decisions, in a fixed order.

    sampler = LogitsSampler(config, prompt_token_ids)
    sampler.best(logits, prefix=[])            # the greedy token
    sampler.distribution(logits, prefix=[])    # target_probs or draft_probs

Order, and the upstream behaviour each step follows:

1. repetition penalty: Transformers' `RepetitionPenaltyLogitsProcessor`, over prompt and answer
2. presence and frequency penalty: OpenAI's API, over the answer
3. temperature
4. top-k, 5. top-p, 6. min-p: Transformers' warpers of these names, in its order

Each step sees exactly the tokens that it would see in plain decoding: row i of a draft counts the i draft tokens
before it, and the state holds committed tokens only.
"""

from outrider.sampling.sampler import LogitsSampler

__all__ = ["LogitsSampler"]
