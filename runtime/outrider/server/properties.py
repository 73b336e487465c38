"""What the server says of itself, as clients of llama.cpp and vLLM ask for it."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from outrider import __version__
from outrider.server.endpoint import Service, as_json
from outrider.server.models import Model


def property_routes(service: Service) -> list[BaseRoute]:
    """The addresses."""
    return [
        Route("/props", partial(_props, service)),
        Route("/slots", partial(_slots, service)),
        Route("/load", partial(_load, service)),
        Route("/version", _version),
    ]


async def _props(service: Service, request: Request) -> Response:
    """llama.cpp's. `?model=` names one of several models; the first one is described without it."""
    name = request.query_params.get("model")
    model = service.models.all[0] if not name else service.models.find(name)
    return as_json(_properties_of(service, model))


def _properties_of(service: Service, model: Model) -> dict[str, Any]:
    info, templates, settings = model.info, model.chat_templates, model.config.generation
    context = info.max_model_len
    return {
        "default_generation_settings": {
            "n_ctx": context,
            "params": {
                "n_predict": -1 if settings.max_new_tokens is None else settings.max_new_tokens,
                "temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p,
                "min_p": settings.min_p, "typical_p": settings.typical_p,
                "repeat_penalty": settings.repetition_penalty, "presence_penalty": settings.presence_penalty,
                "frequency_penalty": settings.frequency_penalty, "stop": list(settings.stop),
            },
        },
        "total_slots": service.queue.max_running,
        "model_alias": model.name,
        "model_path": model.name,  # of files on this machine, clients need not know
        "modalities": {"vision": info.vision, "audio": False},
        "endpoint_slots": True, "endpoint_props": False, "endpoint_metrics": True,
        "chat_template": templates.default,
        **({} if (own := templates.own_with_tools) == templates.default else {"chat_template_tool_use": own}),
        "bos_token": templates.special_tokens.get("bos_token", ""),
        "eos_token": templates.special_tokens.get("eos_token", ""),
        "build_info": f"outrider {__version__}",
        "is_sleeping": not info.loaded,
    }  # fmt: skip


async def _slots(service: Service, request: Request) -> Response:
    """llama.cpp's: the places for answers that run at a time, and which of them are taken."""
    queue, context = service.queue, service.models.all[0].info.max_model_len
    slots = [{"id": i, "n_ctx": context, "is_processing": i < queue.running} for i in range(queue.max_running)]
    if request.query_params.get("fail_on_no_slot") and queue.running >= queue.max_running:
        return Response(as_json({"error": {"code": 503, "message": "no slot available"}}).body, 503)
    return as_json(slots)


async def _load(service: Service, _: Request) -> Response:
    """vLLM's: how many answers run or wait."""
    return as_json({"server_load": service.queue.running + service.queue.waiting})


async def _version(_: Request) -> Response:
    return as_json({"version": __version__})
