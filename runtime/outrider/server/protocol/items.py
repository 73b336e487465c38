"""Bodies of /v1/responses: requests, and what answers them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec

from outrider.server.protocol.requests import (
    Asked,
    AtLeastOne,
    Effort,
    Function,
    FunctionName,
    InputTextPart,
    JsonObject,
    NamedSchema,
    OutputTextPart,
    PlainText,
    RefusalPart,
    Text,
    TextPart,
)

Status = Literal["in_progress", "completed", "incomplete"]


class InputImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="input_image"):
    """An image, as a part of a message, for a model that sees them.

    image_url: data:image/…;base64,…; nothing is fetched from the network. file_id: refused, no files are stored here.
    detail: without effect, the model cuts images in its own way.
    """

    image_url: Text | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class ReasoningTextPart(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """The reasoning of an earlier answer."""

    text: str


InputPart = InputTextPart | TextPart | OutputTextPart | InputImagePart | ReasoningTextPart | RefusalPart


class InputItem(msgspec.Struct, frozen=True):
    """A message, with role and content; a function_call that was made, with call_id, name and arguments; or its
    function_call_output, with call_id and output; or the reasoning before one of them, whose content is a
    reasoning_text; or an item_reference to an item of a stored answer, by its id. What earlier answers have besides is
    ignored.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    output: str | list[InputPart] | None = None


class ResponseTool(Function, frozen=True, kw_only=True, omit_defaults=False):
    """A function that the model may call. parameters: a JSON schema. strict: calls follow the tools' schemas."""

    type: Literal["function"]


class ResponseToolChoice(FunctionName, frozen=True, kw_only=True):
    """The function that the model has to call."""

    type: Literal["function"]


class SchemaFormat(NamedSchema, frozen=True, tag_field="type", tag="json_schema"):
    """JSON by a schema, which answers always follow. name, description, strict: without effect."""


class TextOptions(msgspec.Struct, frozen=True):
    """The form of the answer's text."""

    format: PlainText | JsonObject | SchemaFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    """include_obfuscation: ignored."""

    include_obfuscation: bool | None = None


class ResponseRequest(Asked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A text or items to answer. previous_response_id: of a stored answer, which these follow.

    instructions: a system message for this answer alone. store: keep the conversation for previous_response_id, while
    there is room; true unless set. parallel_tool_calls: false ends the answer with its first call. include:
    "message.output_text.logprobs" for log-probabilities; others are ignored. top_logprobs: of so many likeliest tokens.
    """

    input: str | Annotated[list[InputItem], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: AtLeastOne | None = None
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: Effort | None = None
    thinking: Effort | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None


def listed(item: InputItem, item_id: str) -> dict[str, Any]:
    """An item of a request's input as a list of them has it."""
    fields: dict[str, Any] = _without_nulls(msgspec.to_builtins(item)) | {"id": item_id}
    if item.type == "message":
        kind = "output_text" if item.role == "assistant" else "input_text"
        parts = fields.get("content", "")
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        fields["content"] = [part | {"type": kind} if part["type"] == "text" else part for part in parts]
    elif item.type == "reasoning":
        fields |= {"summary": []}
    elif isinstance(item.arguments, dict):
        fields["arguments"] = json.dumps(item.arguments, ensure_ascii=False)
    return fields | {"status": "completed"}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value
