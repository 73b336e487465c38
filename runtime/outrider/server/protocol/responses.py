"""Bodies of responses."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong. param: the field of the request that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    error: ErrorBody


class Health(msgspec.Struct, frozen=True):
    """As llama-server's."""

    status: Literal["ok"] = "ok"


class ModelInfo(msgspec.Struct, frozen=True):
    """A model that is served. loaded: whether it is in memory. loading: what its load is doing, if one is under way.

    drafters: values of `drafter`, besides auto and none. adapters: values of `adapter`, besides none; or
    "id:adapter" is the model's name. tools, reasoning: whether the chat template has a known form of calls and of
    reasoning. vision: whether it sees images. type: "llm" for one that writes.
    """

    id: str
    created: Count  # seconds since 1970
    loaded: bool
    loading: str | None
    drafters: list[str]
    adapters: list[str]
    max_model_len: Count  # context length, in tokens; the cache may hold less
    architecture: str
    quantization: str
    tools: bool
    reasoning: bool
    vision: bool
    type: Literal["llm", "embeddings", "rerank"] = "llm"
    object: Literal["model"] = "model"
    owned_by: Literal["outrider"] = "outrider"


class ModelList(msgspec.Struct, frozen=True):
    """All models that are served."""

    data: list[ModelInfo]
    object: Literal["list"] = "list"


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens: prompt tokens that were taken from the prefix cache."""

    cached_tokens: Count


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """reasoning_tokens: those of the model's reasoning, with its markers."""

    reasoning_tokens: Count


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request: the prompt's, those of all choices, and both."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptProgress(msgspec.Struct, frozen=True):
    """How far a prompt is read, in tokens, as llama-server says it.

    processed: those that are read or were found in the prefix cache, which `cache` were. time_ms: since the reading
    began.
    """

    total: Count
    cache: Count
    processed: Count
    time_ms: Count


class Timings(msgspec.Struct, frozen=True):
    """Counts and milliseconds, with llama-server's names.

    cache_n: prompt tokens from the prefix cache; prompt_n: those that were read. prompt_ms: to the first token, waiting
    in the engine included. draft_n, draft_n_accepted: draft tokens, and those that were accepted. rounds_n, which
    llama-server has not: calls of the main model after the prompt was read. Of several choices: the sums of the counts,
    and the longest times.
    """

    cache_n: Count
    prompt_n: Count
    prompt_ms: Seconds
    prompt_per_token_ms: Seconds
    prompt_per_second: Seconds
    predicted_n: Count
    predicted_ms: Seconds
    predicted_per_token_ms: Seconds
    predicted_per_second: Seconds
    draft_n: Count
    draft_n_accepted: Count
    rounds_n: Count


class TopLogprob(msgspec.Struct, frozen=True):
    """A likely token. bytes: of its text in UTF-8, also of one that is part of a character; null if it has none."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of the answer, and the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry for each token."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Lists with one entry for each token. text_offset: where the token begins, in characters.

    token_logprobs, top_logprobs: null for the first token of a prompt that is echoed.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Token(msgspec.Struct, frozen=True):
    """A token of the answer, and where it comes from; see `outrider.decoding.results.AnswerToken`."""

    id: Count
    text: str
    source: Literal["accepted", "recovered", "bonus", "plain"]
    drafter: str | None


class FunctionCall(msgspec.Struct, frozen=True):
    """arguments: JSON."""

    name: str
    arguments: str


class ServedToolCall(msgspec.Struct, frozen=True):
    """A call that the model asks for."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionPart(msgspec.Struct, frozen=True):
    """What a piece of a stream adds to a call's arguments. name: in its first piece."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallPart(msgspec.Struct, frozen=True):
    """A piece of call `index`. id, type: in its first piece."""

    index: Count
    function: FunctionPart
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Message(msgspec.Struct, frozen=True):
    """The model's answer. reasoning_content, reasoning: two names of the reasoning before it, if there is any."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ServedToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One of n answers. seed: with which this answer can be had again; null when greedy. tokens: with return_tokens."""

    index: Count
    message: Message
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None
    seed: int | None
    tokens: list[Token] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """The answer to a chat."""

    id: str
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings
    system_fingerprint: str
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a piece of a stream adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """A piece of one of n answers. seed: in its last piece."""

    index: Count
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    seed: int | UnsetType | None = UNSET
    tokens: list[Token] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    """An event of a stream. usage: in the last event, null before, absent unless it was asked for."""

    id: str
    created: Count
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    prompt_progress: PromptProgress | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """One of the answers, or a piece of it."""

    index: Count
    text: str
    finish_reason: FinishReason | None = None
    logprobs: CompletionLogprobs | None = None
    seed: int | UnsetType | None = UNSET
    tokens: list[Token] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """The answers to prompts, or an event of their stream."""

    id: str
    created: Count
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    object: Literal["text_completion"] = "text_completion"
    prompt_progress: PromptProgress | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
