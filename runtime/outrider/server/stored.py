"""Stored answers of /v1/responses: to read them and what they follow, and to delete them."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from outrider.server.endpoint import Service, as_json
from outrider.server.errors import ApiError, bad_field

_PATH = "/v1/responses/{response_id}"


class _Page(msgspec.Struct, frozen=True):
    """What of a list is wanted. order: "desc" for the newest first. after: the id of the item before the page."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    before: None = None


def stored_routes(service: Service) -> list[BaseRoute]:
    """The addresses."""
    return [
        Route(_PATH, partial(_read, service), methods=["GET"]),
        Route(_PATH, partial(_delete, service), methods=["DELETE"]),
        Route(f"{_PATH}/input_items", partial(_list, service), methods=["GET"]),
    ]


async def _read(service: Service, request: Request) -> Response:
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        message = "A stored response is complete, and is not streamed. Leave stream out."
        raise ApiError(400, message, param="stream", code="unsupported_field")
    response, _ = service.conversations.find(request.path_params["response_id"])
    return as_json(response)


async def _delete(service: Service, request: Request) -> Response:
    name = request.path_params["response_id"]
    service.conversations.delete(name)
    return as_json({"id": name, "object": "response", "deleted": True})


async def _list(service: Service, request: Request) -> Response:
    try:
        page = msgspec.convert(dict(request.query_params), _Page, strict=False)
    except msgspec.ValidationError as error:
        raise bad_field(error) from error
    _, before = service.conversations.find(request.path_params["response_id"])
    items = [*map(msgspec.to_builtins, before if page.order == "asc" else reversed(before))]
    ids = [item["id"] for item in items]
    if page.after is not None and page.after not in ids:
        message = f"No item before this response has the id '{page.after[:100]}'. Leave after out."
        raise ApiError(400, message, param="after", code="item_not_found")
    first = 0 if page.after is None else ids.index(page.after) + 1
    shown, ids = items[first : first + page.limit], ids[first : first + page.limit]
    page_ids = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return as_json({"object": "list", "data": shown, **page_ids, "has_more": first + len(shown) < len(items)})
