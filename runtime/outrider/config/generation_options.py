"""The types of one request's options, for type checkers and editors.

    options: GenerationOptions = {"temperature": 0.1}
    engine.generate(prompt, **options)

A misspelt name is found before the program runs. A test holds this to `GenerationConfig`, which describes and checks
the options.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class GenerationOptions(TypedDict, total=False):
    """The fields of `GenerationConfig`, each with the values that it is read from."""

    max_new_tokens: int | None
    drafter: str | None
    adapter: str | None
    num_assistant_tokens: int | str
    assistant_confidence_threshold: float | None
    max_ngram_size: int
    references: str | Sequence[str]
    earlier_answers: bool
    temperature: float
    sampling: str
    acceptance_threshold: float | None
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    no_repeat_ngram_size: int
    banned_token_ids: Sequence[int]
    min_new_tokens: int
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    stop_in_reasoning: bool
    json_schema: Mapping[str, Any] | str | bool | None
    regex: str | None
    grammar: str | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any]
    continue_final_message: bool
    reasoning_budget: int | None
    ignore_eos: bool
    logprobs: int | None
    logprobs_of: str
