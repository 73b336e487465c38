"""Bodies of requests for chats and completions.

Every field is optional unless it has no default. null is the same as leaving a field out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from outrider.config import SAMPLING

MOST_CHOICES = 128  # of a prompt, and prompts of a request; more than a server runs are refused by its queue

AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
TokenId = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: send the usage in an event of its own, before the end. include_obfuscation: ignored."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A text, as a part of a message."""

    text: str


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """url: data:image/…;base64,…; nothing is fetched from the network.

    detail: without effect, the model cuts images in its own way.
    """

    url: Text
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    """An image, as a part of a message, for a model that sees them."""

    image_url: ImageUrl


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """arguments: JSON."""

    name: str
    arguments: str


class MadeCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that the model has made in an earlier turn."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A turn of the conversation. "developer" is another word for "system". A turn with tool_calls needs no content.

    name, tool_call_id: for the chat template.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart | ImagePart], msgspec.Meta(min_length=1)] | None = None
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call. parameters: a JSON schema. strict: calls follow the tools' schemas."""

    name: Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function, as OpenAI's API describes it."""

    function: Function
    type: Literal["function"]


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the tools."""

    name: str


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function that the model has to call."""

    function: FunctionName
    type: Literal["function"]


class PlainText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """A JSON object, whatever it holds."""


class NamedSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema, which answers always follow. name, description, strict: without effect."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON by a schema."""

    json_schema: NamedSchema


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text that the answer probably repeats, to copy drafts from: the first of `references`."""

    content: str | list[TextPart]
    type: Literal["content"] = "content"


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that all requests for text share.

    adapter: one of the model's LoRA adapters, or "none". draft_model, drafter: one of its drafters, "auto" or "none".
    num_assistant_tokens: draft tokens a round. The others are OpenAI's, and options of `GenerationConfig`.
    """

    model: str
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1000)] | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    seed: int | None = None
    stop: Text | Annotated[list[Text], msgspec.Meta(max_length=64)] | None = None
    # llama-server's, LM Studio's, vLLM's and our own
    regex: Text | None = None
    grammar: Text | None = None
    adapter: Text | None = None
    draft_model: Text | None = None
    drafter: Text | None = None
    num_assistant_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] | Literal["auto"] | None = None
    assistant_confidence_threshold: Share | None = None
    max_ngram_size: Annotated[int, msgspec.Meta(ge=1, le=16)] | None = None
    references: Annotated[list[Text], msgspec.Meta(max_length=64)] | None = None
    sampling: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(SAMPLING)})] | None = None
    acceptance_threshold: Share | None = None
    top_k: NotNegative | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    typical_p: Share | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] | None = None
    no_repeat_ngram_size: NotNegative | None = None
    banned_token_ids: list[NotNegative] | None = None
    stop_token_ids: list[NotNegative] | None = None
    min_new_tokens: NotNegative | None = None
    ignore_eos: bool | None = None


class Generation(Asked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that chats and completions share.

    n: answers to a prompt; the i-th has the seed `seed` + i. return_tokens: say of each token where it comes from.
    """

    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: AtLeastOne | None = None
    response_format: PlainText | JsonObject | JsonSchema | None = None
    logprobs_of: Literal["unprocessed", "processed"] | None = None
    return_tokens: bool | None = None


class ChatRequest(Generation, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A chat to answer. parallel_tool_calls: false ends the answer with its first call."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    prediction: Prediction | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(Generation, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Texts to continue: one or several, or their token ids. The chat template is not used."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        msgspec.Meta(
            extra_json_schema={
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
                ]
            }
        ),
    ]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
