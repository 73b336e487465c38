"""Bodies of requests for embeddings and rankings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

MOST_TEXTS = 2048  # of one request, as OpenAI's

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
_TEXTS_OR_IDS: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MOST_TEXTS},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
            "maxItems": MOST_TEXTS,
        },
    ]
}


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Texts to embed: one or several, or their token ids. dimensions: the first numbers of each embedding alone."""

    input: Annotated[str | list[str | int | list[int]], msgspec.Meta(extra_json_schema=_TEXTS_OR_IDS)]
    model: str = ""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: AtLeastOne | None = None
    truncate: bool | None = None


class RerankText(msgspec.Struct, frozen=True):
    """A document as an object."""

    text: str


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Documents to rank by their relevance for a query, as Jina, Cohere, vLLM and llama.cpp write it."""

    query: str
    documents: Annotated[list[str | RerankText], msgspec.Meta(min_length=1, max_length=MOST_TEXTS)]
    model: str = ""
    top_n: AtLeastOne | None = None
    return_documents: bool | None = None


class OllamaEmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ollama's own. truncate: unless false, texts that are too long are cut."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: AtLeastOne | None = None


class OllamaEmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Its older form, of one text."""

    model: str
    prompt: str
