"""Bodies of requests for chats and completions.

Every field is optional unless it has no default. null is the same as leaving a field out. Unknown keys within fields
are ignored: `reading` lists them in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from outrider.config import GenerationConfig
from outrider.config.option import Option, options_of

MOST_CHOICES = 128  # of a prompt, and prompts of a request; more than a server runs are refused by its queue

AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
# Without what formats of calls put around a name.
ToolName = Annotated[str, msgspec.Meta(pattern=r"^[^\s\"'`\\<>{}\[\]|]{1,128}$")]
RoleName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
TokenId = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")]


class StreamOptions(msgspec.Struct, frozen=True):
    """include_usage: send the usage in an event of its own, before the end. include_obfuscation: ignored."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A text, as a part of a message."""

    text: str


class InputTextPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """A text, as /v1/responses calls it."""

    text: str


class OutputTextPart(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """A text of an earlier answer, as /v1/responses calls it."""

    text: str


class RefusalPart(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """What an earlier answer refuses, which is its text."""

    refusal: str


class ThinkingPart(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """The reasoning of an earlier answer. thinking: a text, or parts with a text."""

    thinking: str | list[TextPart]


class ReasoningPart(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The same by another name."""

    text: str = ""


class ImageUrl(msgspec.Struct, frozen=True):
    """url: data:image/…;base64,…; nothing is fetched from the network.

    detail: without effect, the model cuts images in its own way.
    """

    url: Text
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    """An image, as a part of a message, for a model that sees them. image_url: the object, or the URL alone."""

    image_url: ImageUrl | Text


class CalledFunction(msgspec.Struct, frozen=True):
    """arguments: JSON, as a text or as an object. None, or an empty text: there are none."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MadeCall(msgspec.Struct, frozen=True):
    """A call that the model has made in an earlier turn."""

    function: CalledFunction
    id: str | None = None


Part = TextPart | ImagePart | InputTextPart | OutputTextPart | RefusalPart | ThinkingPart | ReasoningPart


class ChatMessage(msgspec.Struct, frozen=True):
    """A turn of the conversation. "developer" is another word for "system". A turn with tool_calls needs no content.

    role: system, user, assistant, tool, or what the chat template has besides.

    name, tool_call_id: for the chat template. reasoning_content, reasoning, thinking: names of an earlier answer's
    reasoning, for the chat template. audio, function_call: are not read, so that only null is taken.
    """

    role: RoleName
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    audio: None = None
    function_call: None = None


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call. parameters: a JSON schema. strict: calls follow the tools' schemas."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A function, as OpenAI's API describes it."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, frozen=True):
    """One of the tools."""

    name: str


class ToolChoice(msgspec.Struct, frozen=True):
    """The function that the model has to call."""

    function: FunctionName
    type: Literal["function"] = "function"


class PlainText(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObject(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    """A JSON object, whatever it holds; with llama.cpp's `schema`, one that follows it."""

    schema: dict[str, Any] | None = None


class NamedSchema(msgspec.Struct, frozen=True):
    """A JSON schema, which answers always follow. name, description, strict: without effect."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    """JSON by a schema."""

    json_schema: NamedSchema


class Prediction(msgspec.Struct, frozen=True):
    """A text that the answer probably repeats, to copy drafts from: the first of `references`."""

    content: str | list[TextPart]
    type: Literal["content"] = "content"


def _field_of(described: Option) -> Any:
    """The type of an option's field."""
    values = described.values
    made: Any = values.kind if values.kind is bool else Text
    if values.kind in (int, float):
        most = 2**31 - 1 if values.high is None else values.high
        limits: dict[str, Any] = {"gt" if values.above else "ge": values.low, "le": most if most < 2**63 else None}
        made = Annotated[values.kind, msgspec.Meta(**limits)]
    elif values.kind is tuple:
        made = list[NotNegative] if values.item is int else Annotated[list[Text], msgspec.Meta(max_length=64)]
    elif values.choices:
        made = Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(values.choices)})]
    if described.default == "auto" and values.kind is not str:
        made |= Literal["auto"]
    return Annotated[made | None, msgspec.Meta(description=described.meaning)]


# Options of `GenerationConfig` that requests have as fields. `Asked` replaces those that OpenAI gives another form.
SERVED = {name: described for name, described in options_of(GenerationConfig).items() if described.server}
if TYPE_CHECKING:
    _Served = msgspec.Struct
else:
    _Served = msgspec.defstruct(
        "_Served",
        [(name, _field_of(each), None) for name, each in SERVED.items() if each.values.kind is not Mapping],
        frozen=True,
        kw_only=True,
    )


class Asked(_Served, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that all requests for text share.

    model: may be left out where one model is served. draft_model: another name of `drafter`. seed: OpenAI's may be
    negative.
    """

    model: str = ""
    stream: bool | None = None
    seed: int | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    stop: Text | Annotated[list[Text], msgspec.Meta(max_length=64)] | None = None
    draft_model: Text | None = None


class LoadRequest(Asked, frozen=True, kw_only=True):
    """Ollama's request without a prompt: load the model, or unload it. unload: unless somebody uses it."""

    unload: bool = False


class Generation(Asked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that chats and completions share.

    n: answers to a prompt; the i-th has the seed `seed` + i. return_tokens: say of each token where it comes from.
    return_progress: a stream has events with `prompt_progress` while the prompt is read.
    """

    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: AtLeastOne | None = None
    response_format: PlainText | JsonObject | JsonSchema | None = None
    logprobs_of: Literal["unprocessed", "processed"] | None = None
    return_progress: bool | None = None
    return_tokens: bool | None = None


class Effort(msgspec.Struct, frozen=True):
    """How much the model is to think, as OpenAI, OpenRouter, Anthropic and DeepSeek write it.

    effort: a variable of the chat template; "none" for no reasoning. max_tokens, budget_tokens: most tokens of it.
    enabled; type: "enabled", "disabled" or "adaptive". exclude: leave it out of the answer.
    """

    effort: str | None = None
    max_tokens: NotNegative | None = None
    budget_tokens: NotNegative | None = None
    enabled: bool | None = None
    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    exclude: bool | None = None


class Reasoned(Generation, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of a chat that say what its template is given, and how reasoning comes.

    chat_template_kwargs: variables of the chat template; reasoning_effort, enable_thinking, documents, verbosity and
    what `reasoning` and `thinking` say are variables, too. reasoning_format: "none" leaves reasoning in the content.
    include_reasoning: false leaves it out.
    """

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    documents: list[Any] | None = None
    verbosity: str | None = None
    reasoning: Effort | None = None
    thinking: Effort | None = None
    reasoning_format: Literal["auto", "none", "deepseek", "deepseek-legacy"] | None = None
    include_reasoning: bool | None = None


class ChatRequest(Reasoned, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A chat to answer. parallel_tool_calls: false ends the answer with its first call.

    continue_final_message: go on with the last message, the assistant's; true unless set, or unless
    add_generation_prompt is true.
    """

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    prediction: Prediction | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(Generation, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Texts to continue: one or several, or their token ids. The chat template is not used.

    max_tokens: 0 only reads the prompt. suffix: what follows the text that is asked for, for models with tokens to fill
    in the middle. echo: the answer begins with the prompt.
    """

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
    max_tokens: NotNegative | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    suffix: str | None = None
    echo: bool | None = None
