"""Bodies of responses."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
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
