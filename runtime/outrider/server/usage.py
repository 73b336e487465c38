"""Counts and times of a request, as OpenAI's API and llama-server give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.decoding.metrics import Stats


def usage_of(stats: Sequence[Stats], n: int, num_reasoning: int = 0) -> dict[str, Any]:
    """The tokens of all choices; a prompt's, which n choices in a row share, are counted once."""
    prompts = stats[::n]
    num_prompt_tokens = sum(each.num_prompt_tokens for each in prompts)
    num_generated_tokens = sum(each.num_generated_tokens for each in stats)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated_tokens,
        "total_tokens": num_prompt_tokens + num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.num_cached_tokens for each in prompts)},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def progress_of(stats: Stats, seconds: float) -> dict[str, int]:
    """How far a prompt is read, in tokens, as llama-server says it: those in the prefix cache are `cache`.

    seconds: since the reading began.
    """
    read = {"cache": stats.num_cached_tokens, "processed": stats.num_read_tokens}
    return {"total": stats.num_prompt_tokens, **read, "time_ms": int(seconds * 1000)}


def timings_of(stats: Sequence[Stats]) -> dict[str, Any]:
    """The sums of all choices' counts, and the longest of their times, with llama-server's names.

    cache_n: prompt tokens from the prefix cache; prompt_n: those that were read. prompt_ms: to the first token, waiting
    in the engine included. rounds_n, which llama-server has not: calls of the main model after the prompt was read.
    """
    num_read = sum(each.num_prompt_tokens - each.num_cached_tokens for each in stats)
    num_predicted = sum(each.num_generated_tokens for each in stats)
    prompt_ms = max(each.time_to_first_token for each in stats) * 1e3
    predicted_ms = max(each.decode_seconds for each in stats) * 1e3
    return {
        "cache_n": sum(each.num_cached_tokens for each in stats),
        "prompt_n": num_read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, num_read),
        "prompt_per_second": _ratio(num_read * 1e3, prompt_ms),
        "predicted_n": num_predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, num_predicted),
        "predicted_per_second": _ratio(num_predicted * 1e3, predicted_ms),
        "draft_n": sum(each.num_draft_tokens for each in stats),
        "draft_n_accepted": sum(each.num_accepted_tokens for each in stats),
        "rounds_n": sum(each.num_rounds for each in stats),
    }


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0
