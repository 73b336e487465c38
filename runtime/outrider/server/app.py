"""Routes and wiring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from os import PathLike, stat_result
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from outrider.bundle import Bundle
from outrider.config import Config
from outrider.errors import OutriderError
from outrider.server.addresses import nearest_address
from outrider.server.bodies import Bodies
from outrider.server.chat import CHAT
from outrider.server.completions import COMPLETIONS
from outrider.server.conversations import Conversations
from outrider.server.encoding import encoding_routes
from outrider.server.endpoint import Endpoint, Service, as_json, read_json
from outrider.server.errors import ApiError, as_api_error
from outrider.server.limits import Queue
from outrider.server.llamacpp import COMPLETION, INFILL
from outrider.server.messages import MESSAGES
from outrider.server.metrics import Metrics
from outrider.server.models import Models
from outrider.server.ollama import OLLAMA_CHAT, OLLAMA_TEXT, running, shown, tag_of
from outrider.server.openapi import describe
from outrider.server.protocol.reading import as_text
from outrider.server.protocol.responses import Health, ModelList
from outrider.server.responses import RESPONSES
from outrider.server.security import AccessGuard
from outrider.server.settings import Settings
from outrider.server.stored import stored_routes
from outrider.server.tokenizing import tokenizing_routes
from outrider.version import __version__

DIALECTS = (CHAT, RESPONSES, COMPLETIONS, COMPLETION, INFILL, MESSAGES, OLLAMA_CHAT, OLLAMA_TEXT)
_OLLAMA = "0.12.0"  # whose API below /api is spoken here
_METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


def make_app(
    bundles: Mapping[str, str | Path | Bundle], settings: Settings | None = None, config: Config | None = None
) -> Starlette:
    """An ASGI app that serves bundles by name.

        uvicorn.run(make_app({"qwen": "qwen-coder-pair"}), port=8000)

    config: of all engines. Its generation options are the defaults of requests. `app.state.service` is the `Service`.

    Raises:
        BundleError: when a bundle is missing or damaged.
        OptionError: when there is none.
    """
    settings = settings or Settings()
    models = Models(bundles, config or Config(), strict=settings.strict_models)
    queue = Queue(settings.max_running, settings.max_waiting)
    metrics = Metrics([model.name for model in models.all])
    service = Service(settings, models, queue, metrics, Conversations(settings.max_stored), Bodies(settings))
    app = Starlette(
        routes=[
            *(Route(path, partial(_health, service)) for path in ("/health", "/v1/health")),
            Route("/ping", partial(_health, service), methods=["GET", "POST"]),
            Route("/metrics", partial(_metrics, service)),
            Route("/openapi.json", partial(_openapi, service)),
            Route("/v1/models", partial(_list_models, service)),
            Route("/v1/models/{name:path}", partial(_model, service)),
            *(Route(each.path, Endpoint(service, each), methods=["POST"]) for each in DIALECTS),
            *stored_routes(service),
            Route("/api/version", partial(_version, _OLLAMA)),
            Route("/api/tags", partial(_tags, service)),
            Route("/api/ps", partial(_running, service)),
            Route("/api/show", partial(_show, service), methods=["POST"]),
            *encoding_routes(service),
            *tokenizing_routes(service),
            Route("/load", partial(_load, service)),
            Route("/version", partial(_version, __version__)),
            *page_routes(),
        ],
        middleware=[Middleware(AccessGuard, settings=settings)],
        exception_handlers=dict.fromkeys((ApiError, OutriderError, HTTPException, Exception), _failed),
        lifespan=partial(_lifespan, service),
    )
    app.state.service = service
    return app


@asynccontextmanager
async def _lifespan(service: Service, _: Starlette) -> AsyncIterator[None]:
    seconds = service.settings.idle_seconds
    watch = None if seconds is None else asyncio.create_task(service.models.watch(seconds))
    try:
        yield
    finally:
        if watch is not None:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
        await service.models.close()


async def _failed(request: Request, error: Exception) -> Response:
    made, path = as_api_error(error), request.scope["path"]
    if isinstance(error, HTTPException) and error.status_code == 404:
        paths = [route.path for route in request.app.routes if isinstance(route, Route)]
        made = ApiError(404, f"{made}{nearest_address(path, paths)}", code="unknown_url")
    return made.response(path)


async def _health(service: Service, _: Request) -> Response:
    """As llama-server: 503 while the first model is loaded."""
    if service.models.is_starting:
        doing = service.models.progress
        raise ApiError(503, f"Loading model: {doing}" if doing else "Loading model", type="unavailable_error")
    return as_json(Health())


async def _metrics(service: Service, _: Request) -> Response:
    for model in service.models.all:
        service.metrics.cache_use.labels(model.name).set(model.cache_use)
    return Response(service.metrics.text(), media_type=_METRICS_TYPE)


async def _openapi(service: Service, _: Request) -> Response:
    return as_json(
        describe(
            [model.name for model in service.models.all],
            encoders={
                kind: [each.name for each in service.models.encoders.by_name.values() if each.kind == kind]
                for kind in ("embedding", "rerank")
            },
            needs_key=service.settings.api_key is not None,
        )
    )


async def _list_models(service: Service, _: Request) -> Response:
    models = service.models.served
    return as_json(ModelList([model.info for model in models]))


async def _version(version: str, _: Request) -> Response:
    """vLLM's version, and Ollama's, by which clients see whether it is there, and what it has."""
    return as_json({"version": version})


async def _load(service: Service, _: Request) -> Response:
    """vLLM's: how many answers run or wait."""
    return as_json({"server_load": service.queue.running + service.queue.waiting})


async def _tags(service: Service, _: Request) -> Response:
    return as_json({"models": [*map(tag_of, service.models.served)]})


async def _running(service: Service, _: Request) -> Response:
    loaded, seconds = [each for each in service.models.served if each.info.loaded], service.settings.idle_seconds
    return as_json({"models": [running(model, seconds) for model in loaded]})


async def _show(service: Service, request: Request) -> Response:
    name = await read_json(service, request, lambda fields: as_text(fields.get("model", fields.get("name")), "model"))
    name = name.removesuffix(":latest")
    encoder = service.models.encoders.by_name.get(name)
    return as_json(shown(service.models.find(name) if encoder is None else encoder))


async def _model(service: Service, request: Request) -> Response:
    return as_json(service.models.info(request.path_params["name"]))


_FOLDER = Path(__file__).with_name("page_files")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cache-Control": "no-cache",  # browsers ask each time, and are told that nothing has changed
}
_TYPES = {  # Python asks the system for them, which may know others, and browsers run no script of another
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class _Files(StaticFiles):
    """The files of the page for browsers at /, a chat that shows which tokens were drafted.

    Scripts and styles come from these files alone, without inline code, and talk to this server only. No script can
    make HTML of a text: the page has no Trusted Types.
    """

    def file_response(
        self, full_path: str | PathLike[str], stat_result: stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        kind = {} if response.status_code == 304 else {"Content-Type": _TYPES[Path(full_path).suffix]}
        response.headers.update(_HEADERS | kind)
        return response


def page_routes() -> list[BaseRoute]:
    """The page at /, and its files below /page."""
    files = _Files(directory=_FOLDER)
    return [Route("/", partial(_index, files)), Mount("/page", files)]


async def _index(files: _Files, request: Request) -> Response:
    return await files.get_response("index.html", request.scope)
