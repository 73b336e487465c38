"""Samples of a real engine, against the main model's exact joint distribution."""

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import outrider
from outrider_bench.verify.exact import chi_square_p_value, exact_joint

NUM_TOKENS = 3
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
# One thread: the toys' calls are too short for two, and what is sampled does not depend on their number.
CONFIG = outrider.Config().replace(cache_size=0.002, num_threads=1)


def sample_joint(
    engine: outrider.Engine, num_samples: int, processors: dict[str, Any], **options: Any
) -> tuple[float, Iterable[outrider.Stats]]:
    """Three tokens after a prompt, against the exact joint by enumeration: the p-value of a chi-square test.

    The seeds are fixed, so the result is always the same. When they were chosen, a correct sampler had a chance of 1e-4
    of failing each case.
    """

    def generate(seed: int) -> outrider.Result:
        # Tokens more than are looked at, so that a draft of three fits after the first token.
        asked = {"max_new_tokens": NUM_TOKENS + 2, "seed": seed, "ignore_eos": True} | processors | options
        return engine.generate(PROMPT, **asked)

    exact = exact_joint(engine, PROMPT, outrider.GenerationConfig(**processors), NUM_TOKENS)
    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(generate, range(num_samples)))
    counts = Counter(tuple(result.token_ids[:NUM_TOKENS]) for result in results)
    return chi_square_p_value(counts, exact), [result.stats for result in results]
