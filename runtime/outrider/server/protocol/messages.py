"""Bodies of Anthropic's Messages API, /v1/messages: requests, and what answers them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from outrider.server.protocol.requests import AtLeastOne, Effort, NotNegative, TextPart


class MediaSource(msgspec.Struct, frozen=True):
    """An image or a document. type: "base64" with data and media_type, "url" with url, or "text" with data."""

    type: Literal["base64", "url", "text", "content", "file"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    """An image, for a model that sees them."""

    source: MediaSource


class DocumentBlock(msgspec.Struct, frozen=True, tag_field="type", tag="document"):
    """A document; those that are text are read."""

    source: MediaSource
    title: str | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """The reasoning of an earlier answer. Its signature is ignored."""

    thinking: str


class RedactedBlock(msgspec.Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Reasoning that nobody can read; ignored."""


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of an earlier answer."""

    id: str
    name: str
    input: dict[str, Any] = {}


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """What a call gave."""

    tool_use_id: str
    content: str | list[TextPart | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


Block = TextPart | ImageBlock | DocumentBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock


class GivenMessage(msgspec.Struct, frozen=True):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class GivenTool(msgspec.Struct, frozen=True):
    """A function that the model may call. Tools of Anthropic's own, which have another type, are skipped."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    type: str | None = None


class GivenChoice(msgspec.Struct, frozen=True):
    """Whether the model calls functions."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """JSON by a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    """effort: a variable of the chat template. format: of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A chat to answer. The fields that are not named here, if they are of this server, are those of chats."""

    model: str
    messages: Annotated[list[GivenMessage], msgspec.Meta(min_length=1)]
    max_tokens: AtLeastOne | None = None
    system: str | list[TextPart] | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: NotNegative | None = None
    stream: bool | None = None
    tools: list[GivenTool] | None = None
    tool_choice: GivenChoice | None = None
    thinking: Effort | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
