"""The description of the API at /openapi.json, made of the structs that read and write the bodies."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from outrider.server.protocol.encoding import EmbeddingRequest, RerankRequest
from outrider.server.protocol.items import ResponseRequest
from outrider.server.protocol.loose import WRITTEN_AS_TEXTS
from outrider.server.protocol.reading import NEUTRAL
from outrider.server.protocol.requests import Asked, ChatRequest, CompletionRequest
from outrider.server.protocol.responses import ErrorResponse, Health, ModelInfo, ModelList
from outrider.version import __version__

_STRUCTS = (
    ChatRequest, CompletionRequest, ErrorResponse, Health, ModelInfo, ModelList,
    ResponseRequest,
    EmbeddingRequest, RerankRequest,
)  # fmt: skip
# Fields of which more values are taken than their types say, as others send them; see `protocol.loose`.
_NORMALISED = {"stop", "logit_bias", "max_tokens", "max_completion_tokens", "max_output_tokens", "temperature", "top_p",
               "top_k", "logprobs", "reasoning_budget", "tools", "tool_choice"}  # fmt: skip
_PAGE: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The Host header names a host that is not allowed.",
    404: "There is no such model, or no such stored response.",
    408: "The headers or the body arrived too slowly.",
    413: "The body is too large.",
    415: "The body is compressed, or a page's and not declared as JSON.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "A model failed.",
    504: "The answer took longer than this server allows.",
}


def describe(models: Sequence[str], *, encoders: Mapping[str, Sequence[str]], needs_key: bool) -> dict[str, Any]:
    """The description as OpenAPI 3.1. models: the names that requests may ask for. encoders: those for
    embeddings and rankings."""
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template="#/components/schemas/{name}")
    for kind in (ChatRequest, CompletionRequest, ResponseRequest):
        _complete(schemas[kind.__name__], kind, models)
    message = schemas["ChatMessage"]["properties"]
    parts = next(kind["items"] for kind in message["content"]["anyOf"] if "items" in kind)
    parts["anyOf"].append({"type": "string"})
    message["function_call"] = {"description": "A call from before there were tools."}
    # Reasoning that is no text is ignored, and numbers are ids, too.
    message |= {name: {} for name in ("reasoning", "reasoning_content", "thinking", "tool_call_id")}
    for encoding, name in ((EmbeddingRequest, "embedding"), (RerankRequest, "rerank")):
        schemas[encoding.__name__]["properties"]["model"] = {"type": "string", "examples": list(encoders[name])}
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": __version__, "description": "OpenAI's API, on this machine."},
        "paths": {
            "/health": {"get": _get("Whether the server is ready", "Health", 503)},
            "/metrics": {"get": _plain("Metrics for Prometheus, with vLLM's names")},
            "/v1/models": {"get": _get("The models", "ModelList")},
            "/v1/models/{model}": {"get": _get("One model", "ModelInfo", 404), "parameters": [_in_path("model")]},
            "/v1/chat/completions": {"post": _post("Answer a chat", ChatRequest)},
            "/v1/completions": {"post": _post("Continue a text", CompletionRequest)},
            "/v1/responses": {"post": _post("Answer items", ResponseRequest)},
            "/v1/responses/{response_id}": {
                "get": _get("A stored response", "", 400, 404),
                "delete": _get("Delete a stored response", "", 404),
                "parameters": [_in_path("response_id")],
            },
            "/v1/responses/{response_id}/input_items": {
                "get": _get("The items that a stored response follows", "", 400, 404)
                | {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in _PAGE.items()]},
                "parameters": [_in_path("response_id")],
            },
            "/v1/embeddings": {"post": _post("Embed texts", EmbeddingRequest)},
            "/v1/rerank": {"post": _post("Rank documents by a query", RerankRequest)},
        },
        "components": {"schemas": schemas},
    }
    if needs_key:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described


def _complete(schema: dict[str, Any], kind: type[Asked], models: Sequence[str]) -> None:
    """Add the fields that are refused with some values, and the models' names. Others are ignored."""
    schema["properties"]["model"] = {"type": ["string", "null"], "examples": list(models)}
    schema["additionalProperties"] = True
    for name in WRITTEN_AS_TEXTS & schema["properties"].keys():
        schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "string"}]}
    schema["properties"] |= {name: {} for name in _NORMALISED & schema["properties"].keys()}
    for name, values in NEUTRAL[kind].items():
        # false is taken for 0, and 1 for true, but JSON Schema tells them apart.
        alike = [each for each in (False, True, 0, 1) if each in values and not any(each is value for value in values)]
        schema["properties"][name] = {"enum": [*values, *alike], "description": "Not supported with other values."}


def _get(summary: str, name: str, *errors: int) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": _response(summary, name)} | _failures(401, 403, *errors)}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _plain(summary: str) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}} | _failures(401, 403),
    }


def _post(summary: str, request: type) -> dict[str, Any]:
    """An answer is what the API that it is of describes; as a stream, too."""
    done = _response("The answer; with stream, server-sent events.", "")
    done["content"]["text/event-stream"] = {"schema": {"type": "object"}}
    body = {"required": True, "content": {"application/json": {"schema": _ref(request.__name__)}}}
    return {"summary": summary, "requestBody": body, "responses": {"200": done} | _failures(*_ERRORS)}


def _failures(*codes: int) -> dict[str, Any]:
    return {
        str(code): _response(_ERRORS.get(code, "The first model is being loaded."), "ErrorResponse") for code in codes
    }


def _response(description: str, name: str) -> dict[str, Any]:
    schema = _ref(name) if name else {"type": "object"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
