"""Failures as clients see them: a status and OpenAI's error object.

ApiError
├── status 400   a bad request: `param` names the field
├── status 401   no API key, or a wrong one
├── status 404   no such model or address
├── status 408, 413, 415   a request that comes too slowly, a body that is too large, or is not JSON
├── status 429   the queue is full
└── status 500, 503, 504   a failure of the server, its shutdown or too many connections, its time limit
"""

from __future__ import annotations

import logging
import re

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from outrider.errors import EngineClosed, OptionError, OutriderError, RequestError, TooLong, one_line
from outrider.server.protocol.responses import ErrorBody, ErrorResponse
from outrider.server.protocol.writing import to_json

log = logging.getLogger("outrider.server")

_OPTION = re.compile(r"[a-z_]+(?==|\[\d)")  # in our messages about options, the first is the one that is wrong
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")  # where msgspec found something wrong
_LONGEST = 1_000  # characters of a message, which may quote what a client sends
_NAME = ("max_new_tokens", "max_tokens")  # the engine's name of an option, and the API's


class ApiError(Exception):
    """A failure that ends a request with an HTTP status and an error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",  # noqa: A002 - as OpenAI calls it
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…"
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body = ErrorResponse(ErrorBody(message, type, param, code))

    def response(self, path: str = "") -> Response:
        """The HTTP response. path: of the request, whose API says the shape."""
        body = to_json(shaped(self, path))
        return Response(body, self.status, self.headers, media_type="application/json")


# Anthropic's types of errors, by status.
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
          429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}  # fmt: skip


def shaped(error: ApiError, path: str) -> object:
    """The body of an error in the shape that the API at this path has."""
    if path.startswith("/v1/messages"):
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.body.error.message}}
    return {"error": error.body.error.message} if path.startswith("/api/") else error.body


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error. Unexpected ones are logged, and their text stays here."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineClosed):  # no fault of this request: another one found that its device has failed
        message = "The model was unloaded while this request ran. Send it again."
        return ApiError(503, message, type="server_error", code="unloaded")
    if isinstance(error, OptionError | RequestError):
        message = str(error)
        message = message.replace(*_NAME)
        found = _OPTION.search(message)
        kind = "context_length_exceeded" if isinstance(error, TooLong) else "invalid_value"
        return ApiError(400, message, param=found and found[0], code=kind)
    if isinstance(error, HTTPException):
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        message = "There is nothing at this address. /openapi.json describes the addresses of this server."
        if error.status_code != 404:
            allowed = (error.headers or {}).get("Allow")
            message = f"{error.detail}." + (f" This address takes {allowed}." if allowed else "")
        return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))
    if isinstance(error, OutriderError):  # of the model or its device
        log.error("%s", one_line(error))
        return ApiError(500, str(error), type="server_error")
    log.error("A request failed.", exc_info=error)
    return ApiError(500, "The server failed; its log says why.", type="server_error")


def bad_field(error: msgspec.ValidationError) -> ApiError:
    """A body that does not follow the description: the field is named."""
    message = str(error)
    place = _PLACE.search(message)
    if not place or not place[1]:
        return ApiError(400, f"{_PLACE.sub('', message)}.", code="invalid_type")
    wrong = message[: place.start()]
    return ApiError(400, f"'{place[1]}': {wrong[0].lower()}{wrong[1:]}.", param=place[1], code="invalid_type")


def out_of_time(seconds: float) -> ApiError:
    """The time limit of a request has passed."""
    return ApiError(
        504,
        f"The answer was not complete after {seconds:g} s, the limit of this server. Lower max_tokens.",
        type="timeout_error",
        code="timeout",
        headers={"x-should-retry": "false"},  # OpenAI's clients would run into the same limit again
    )
