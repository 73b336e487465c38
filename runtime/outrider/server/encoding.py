"""Answers to requests for embeddings and rankings: OpenAI's, Jina's and Ollama's."""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from outrider.engine.text_encoders import Embedder, Embeddings, Ranking, Reranker
from outrider.server.bodies import Gone, unless_gone
from outrider.server.endpoint import Service, as_json, read_json
from outrider.server.errors import ApiError, out_of_time
from outrider.server.protocol.encoding import (
    MOST_TEXTS,
    EmbeddingRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    RerankRequest,
)
from outrider.server.protocol.loose import IGNORED
from outrider.server.protocol.reading import Body, as_request
from outrider.server.text_encoders import TextEncoder

log = logging.getLogger("outrider.server")

Made = TypeVar("Made")

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/v1/reranking", "/reranking")
_CLIENT_GONE = 499  # nginx's; nobody reads it
_FEWER = f"Send at most {MOST_TEXTS:,} at a time."


def encoding_routes(service: Service) -> list[BaseRoute]:
    """The addresses of embeddings and rankings."""
    answers: dict[str, Callable[[Service, Request], Any]] = {
        "/v1/embeddings": _embeddings,
        "/api/embed": _ollama_embed,
        "/api/embeddings": _ollama_embeddings,
        **dict.fromkeys(RERANK_PATHS, _rerank),
    }
    return [Route(path, partial(_answer, answer, service), methods=["POST"]) for path, answer in answers.items()]


async def _answer(answer: Callable[[Service, Request], Any], service: Service, request: Request) -> Response:
    """The response, unless the client leaves: then its work ends after the call that is under way."""
    try:
        response: Response = await answer(service, request)
    except Gone:
        log.info("A client has disconnected.")
        return Response(status_code=_CLIENT_GONE)
    return response


async def _embeddings(service: Service, request: Request) -> Response:
    asked, texts = await read_json(service, request, _embedding_texts)
    model = service.models.encoders.find(asked.model, "embedding")
    options = {"dimensions": asked.dimensions, "truncate": bool(asked.truncate)}
    made = await _embedded(service, request, model, texts, **options)
    in_base64 = asked.encoding_format == "base64"
    rows = made.vectors.tolist()
    if in_base64:
        rows = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in made.vectors]
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    return as_json({"object": "list", "data": data, "model": model.name, **_usage(made.num_tokens)})


async def _ollama_embed(service: Service, request: Request) -> Response:
    asked = await read_json(service, request, partial(_read, kind=OllamaEmbedRequest))
    began = time.perf_counter()
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    model = service.models.encoders.find(asked.model.removesuffix(":latest"), "embedding")
    if not texts:  # a client asks so whether a model is there
        return as_json({"model": asked.model, "embeddings": []})
    options = {"dimensions": asked.dimensions, "truncate": asked.truncate is not False}
    made = await _embedded(service, request, model, texts, **options)
    answer = {
        "model": asked.model,
        "embeddings": made.vectors.tolist(),
        "total_duration": int((time.perf_counter() - began) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": made.num_tokens,
    }
    return as_json(answer)


async def _ollama_embeddings(service: Service, request: Request) -> Response:
    asked = await read_json(service, request, partial(_read, kind=OllamaEmbeddingRequest))
    model = service.models.encoders.find(asked.model.removesuffix(":latest"), "embedding")
    made = await _embedded(service, request, model, [asked.prompt], truncate=True)
    return as_json({"embedding": made.vectors[0].tolist()})


async def _embedded(
    service: Service, request: Request, model: TextEncoder, texts: Sequence[str | list[int]], **options: Any
) -> Embeddings:
    def embed(embedder: Embedder, cancel: Event) -> Embeddings:
        return embedder.embed(texts, cancel=cancel, **options)

    return await _run(service, request, model, embed)


async def _rerank(service: Service, request: Request) -> Response:
    asked = await read_json(service, request, partial(_read, kind=RerankRequest))
    model = service.models.encoders.find(asked.model, "rerank")
    texts = [each if isinstance(each, str) else each.text for each in asked.documents]

    def rank(reranker: Reranker, cancel: Event) -> Ranking:
        return reranker.rerank(asked.query, texts, top_n=asked.top_n, cancel=cancel)

    made = await _run(service, request, model, rank)
    results: list[dict[str, Any]] = [{"index": each.index, "relevance_score": each.score} for each in made.ranked]
    if asked.return_documents:
        results = [each | {"document": {"text": texts[each["index"]]}} for each in results]
    named = {"id": f"rerank-{secrets.token_hex(12)}", "object": "list", "model": model.name}
    return as_json({**named, "results": results, **_usage(made.num_tokens)})


def _usage(num_tokens: int) -> dict[str, Any]:
    """Tokens that were read."""
    return {"usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}


def _read(fields: dict[str, Any], kind: type[Body]) -> Body:
    """A request. Fields that are not read cannot change an embedding, and are listed once in the log.

    Raises:
        ApiError: with status 400, naming the field that is wrong.
    """
    IGNORED.add(fields.keys() - {*kind.__struct_fields__})
    return as_request(fields, kind)


def _embedding_texts(fields: dict[str, Any]) -> tuple[EmbeddingRequest, list[str | list[int]]]:
    asked = _read(fields, EmbeddingRequest)
    return asked, _texts_of(asked.input)


def _texts_of(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The texts of `input`. A list of numbers is one text."""
    if isinstance(given, str):
        return [given]
    ids = [each for each in given if isinstance(each, int)]
    if ids and len(ids) == len(given):
        return [ids]
    texts = [each for each in given if not isinstance(each, int)]
    if len({type(each) for each in given}) > 1:
        message = "'input' has texts and token ids. Send one kind."
        raise ApiError(400, message, param="input", code="invalid_type")
    if len(texts) > MOST_TEXTS:
        message = f"'input' has {len(texts):,} texts. {_FEWER}"
        raise ApiError(400, message, param="input", code="invalid_value")
    return texts


async def _run(service: Service, request: Request, model: TextEncoder, work: Callable[[Any, Event], Made]) -> Made:
    """What a model makes, in a place of the queue. A client that leaves, or the time limit, ends it after a call."""
    cancel = Event()
    try:
        async with (
            asyncio.timeout(service.settings.request_seconds),
            service.queue.places(1),
            service.models.use(model) as encoder,
        ):
            return await unless_gone(asyncio.to_thread(work, encoder, cancel), request.receive)
    except TimeoutError as error:
        raise out_of_time(service.settings.request_seconds) from error
    finally:
        cancel.set()
