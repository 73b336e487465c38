"""Counts and times of a request, as OpenAI's API and llama-server give them."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.decoding.metrics import Stats
from outrider.server.protocol.responses import (
    CompletionTokensDetails,
    PromptProgress,
    PromptTokensDetails,
    Timings,
    Usage,
)


def usage_of(stats: Sequence[Stats], n: int, num_reasoning: int = 0) -> Usage:
    """The tokens of all choices; a prompt's, which n choices in a row share, are counted once."""
    prompts = stats[::n]
    num_prompt_tokens = sum(each.num_prompt_tokens for each in prompts)
    num_generated_tokens = sum(each.num_generated_tokens for each in stats)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_generated_tokens,
        total_tokens=num_prompt_tokens + num_generated_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(each.num_cached_tokens for each in prompts)),
        completion_tokens_details=CompletionTokensDetails(num_reasoning),
    )


def progress_of(stats: Stats, seconds: float) -> PromptProgress:
    """How far a prompt is read. seconds: since the reading began."""
    return PromptProgress(stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_read_tokens, int(seconds * 1000))


def timings_of(stats: Sequence[Stats]) -> Timings:
    """The sums of all choices' counts, and the longest of their times."""
    num_read = sum(each.num_prompt_tokens - each.num_cached_tokens for each in stats)
    num_predicted = sum(each.num_generated_tokens for each in stats)
    prompt_ms = max(each.time_to_first_token for each in stats) * 1e3
    predicted_ms = max(each.decode_seconds for each in stats) * 1e3
    return Timings(
        cache_n=sum(each.num_cached_tokens for each in stats),
        prompt_n=num_read,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, num_read),
        prompt_per_second=_ratio(num_read * 1e3, prompt_ms),
        predicted_n=num_predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, num_predicted),
        predicted_per_second=_ratio(num_predicted * 1e3, predicted_ms),
        draft_n=sum(each.num_draft_tokens for each in stats),
        draft_n_accepted=sum(each.num_accepted_tokens for each in stats),
        rounds_n=sum(each.num_rounds for each in stats),
    )


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0
