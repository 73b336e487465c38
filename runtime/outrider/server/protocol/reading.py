"""Reads the bodies of requests.

Fields that OpenAI's API has and this server does not implement are accepted with a value that changes nothing.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from outrider.errors import nearest, one_line
from outrider.server.errors import ApiError, bad_field
from outrider.server.protocol.items import ResponseRequest
from outrider.server.protocol.requests import Asked, ChatRequest, CompletionRequest
from outrider.system.nesting import TooDeep, check_json

# Fields that never change an answer: accepted with any value, and ignored.
HARMLESS = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
# Fields that would change an answer and are not implemented, by the kind of request: the values with which they change
# nothing.
NEUTRAL: dict[type[Asked], dict[str, tuple[Any, ...]]] = {
    ChatRequest: {
        "audio": (None,),
        "function_call": (None,),
        "functions": (None,),
        "modalities": (None, ["text"]),
        "reasoning_effort": (None,),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
    },
    CompletionRequest: {
        "best_of": (None, 1),
        "echo": (None, False),
        "suffix": (None,),
    },
    ResponseRequest: {
        "background": (None, False),
        "context_management": (None,),
        "conversation": (None,),
        "include": (None, []),
        "max_tool_calls": (None,),
        "prompt": (None,),
        "reasoning": (None,),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    },
}

Body = TypeVar("Body", bound=Asked)


def read_request(body: bytes, kind: type[Body]) -> Body:
    """Parse and check a body.

    Raises:
        ApiError: with status 400, naming the field that is wrong.
    """
    try:
        check_json(body)
        fields = msgspec.json.decode(body)
    except TooDeep as error:
        raise ApiError(400, f"The body cannot be read: {error}. Make it flatter.", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not JSON: {one_line(error)}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "The body is not a JSON object.", code="invalid_type")
    known = set(kind.__struct_fields__)
    for name in list(fields):
        if name in known:
            continue
        if name in NEUTRAL[kind]:
            _check_neutral(name, fields[name], NEUTRAL[kind][name])
        elif name not in HARMLESS:
            close = nearest(name, known)
            raise ApiError(400, f"There is no field '{name[:100]}'. {close}", param=name[:100], code="unknown_field")
        del fields[name]
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise bad_field(error) from error


def _check_neutral(name: str, value: object, values: tuple[Any, ...]) -> None:
    if not any(value == neutral and isinstance(value, type(neutral)) for neutral in values):
        raise ApiError(
            400, f"'{name}' is not supported by this server. Leave it out.", param=name, code="unsupported_field"
        )
