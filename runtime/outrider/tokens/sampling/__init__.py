"""Logits processors, in a fixed order, and the decisions from processed logits.

    sampler = LogitsSampler(config, prompt_token_ids, end_token_ids=eos_token_ids)
    row, *others = step.rows(chunk)            # or LogitsRow.of(logits)
    sampler.best(row, prefix=[])               # the greedy token
    sampler.distribution(row, prefix=[])       # target_probs or draft_probs
    sampler.logprobs(row, [], token_id)        # the log-probability of a chosen token

Order, and the upstream behaviour each step follows. Classes are those of Transformers 5.5, `logits_process.py`, in the
order of its `_get_logits_processor`:

1.  logit bias: OpenAI's API; `SequenceBiasLogitsProcessor` with sequences of one token. logit + bias
2.  repetition penalty (Keskar et al. 2019): `RepetitionPenaltyLogitsProcessor`, over prompt and answer.
    logit / penalty where it is positive, else logit · penalty
3.  presence and frequency penalty: OpenAI's API, over the answer. logit − presence · (count > 0) − frequency · count
4.  no-repeat n-gram (Paulus et al. 2017): `NoRepeatNGramLogitsProcessor`, over prompt and answer. −inf for tokens that
    would repeat an n-gram
5.  min_new_tokens: `MinNewTokensLengthLogitsProcessor`. −inf for tokens that would end a shorter answer
6.  banned tokens: `SuppressTokensLogitsProcessor`. −inf
7.  grammar: see `outrider.tokens.grammar`. −inf for tokens that may not follow; then the rules of the model itself,
    such as Whisper's for timestamps
8.  temperature: `TemperatureLogitsWarper`. logit / temperature
9.  top-k: `TopKLogitsWarper`. The k highest logits, and those equal to the last of them
10. top-p (Holtzman et al. 2020): `TopPLogitsWarper`. The likeliest tokens until their mass reaches p
11. min-p (Nguyen et al. 2024): `MinPLogitsWarper`. Tokens of at least min_p · the highest probability
12. typical-p (Meister et al. 2022): `TypicalLogitsWarper`. The tokens whose −log(probability) is nearest to the
    entropy, until their mass reaches p

A greedy token is the best one after step 7. Later steps are for sampling. Steps 9 to 12 keep at least one token.

Each step sees the same tokens as in plain decoding: a row of a draft counts the draft tokens before it, in a tree those
on its path, and the state holds committed tokens only. A logit of −inf stays −inf.
"""

from outrider.tokens.sampling.listed import argmax, probability, without
from outrider.tokens.sampling.processors import BannedAtFirst, OnlyTokens, Timestamps
from outrider.tokens.sampling.rows import DraftRows
from outrider.tokens.sampling.sampler import LogitsSampler, Processor
from outrider.tokens.sampling.truncate import ranked

__all__ = [
    "BannedAtFirst", "DraftRows", "LogitsSampler", "OnlyTokens", "Processor", "Timestamps", "argmax", "probability",
    "ranked", "without",
]  # fmt: skip
