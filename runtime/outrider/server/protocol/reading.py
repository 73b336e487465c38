"""Reads the bodies of requests.

Fields of other APIs that cannot change an answer are ignored, and listed once in the log. Those that would, and
are not implemented here, are accepted with a value that changes nothing, and refused by name with others.
"""

from __future__ import annotations

import codecs
from typing import Any, TypeVar

import msgspec

from outrider.errors import nearest, one_line
from outrider.server.errors import ApiError, bad_field
from outrider.server.protocol.items import ResponseRequest
from outrider.server.protocol.loose import Ignored, normalised, unread_keys
from outrider.server.protocol.requests import ChatRequest, CompletionRequest
from outrider.system.nesting import TooDeep, check_json

# Fields that never change an answer: accepted with any value, and ignored. `max_tool_calls` is of hosted tools, of
# which there are none, and `dry_base` and the like are of samplers that are refused, or off.
HARMLESS = (
    "adaptive_decay", "backend_sampling", "cache_prompt", "cache_salt", "caching", "chat_id", "client_metadata",
    "conversation_id", "details", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers",
    "dynatemp_exponent", "guided_decoding_backend", "id", "id_slot", "include", "keep_alive", "litellm_metadata",
    "max_tool_calls", "message_id", "metadata", "mirostat_eta", "mirostat_tau", "models", "n_discard", "n_keep",
    "num_batch", "num_ctx", "num_gpu", "num_retries", "num_thread", "parent_id", "penalize_nl", "priority",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "provider", "request_id", "return_progress",
    "route", "safety_identifier", "service_tier", "session_id", "spaces_between_special_tokens", "store", "tags",
    "timeout", "timings_per_token", "tool_stream", "trace", "trace_id", "ttl", "usage", "user", "user_id",
    "xtc_threshold",
)  # fmt: skip
_NO_MIROSTAT = (None, 0, 0.0)
# What a client may send in place of a field that is refused.
_IN_PLACE_OF = {
    "best_of": "Send n", "function_call": "Send tool_choice", "functions": "Send tools", "n_probs": "Send top_logprobs",
}  # fmt: skip
_UNFOLDED = "OpenAI's Python client has it, and sends the fields within it: send them themselves."
# Samplers and the like of other servers, which are not implemented: the values with which they change nothing.
_OF_OTHERS: dict[str, tuple[Any, ...]] = {
    "adaptive_target": (None, -1, -1.0),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "detokenize": (None, True),
    "dry_multiplier": (None, 0, 0.0),
    "dynatemp_range": (None, 0, 0.0),
    "early_stopping": (None, False),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1, 1.0),
    "lora": (None, []),
    "min_keep": (None, 0),
    "mirostat": _NO_MIROSTAT,
    "mirostat_mode": _NO_MIROSTAT,
    "n_probs": (None, 0),
    "parse_tool_calls": (None, True),
    "plugins": (None, []),
    "post_sampling_probs": (None, False),
    "prompt_logprobs": (None, 0),
    "return_token_ids": (None, False),
    "safe_prompt": (None, False),
    "samplers": (None, []),
    "separate_reasoning": (None, True),
    "skip_special_tokens": (None, True),
    "t_max_predict_ms": (None, 0, -1),
    "tfs_z": (None, 1, 1.0),
    "top_a": (None, 0, 0.0),
    "top_n_sigma": (None, 0, 0.0, -1, -1.0),
    "transforms": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "xtc_probability": (None, 0, 0.0),
}
# Fields that would change an answer and are not implemented, by the kind of request: the values with which they change
# nothing.
NEUTRAL: dict[type[msgspec.Struct], dict[str, tuple[Any, ...]]] = {
    ChatRequest: {
        "add_special_tokens": (None, False),
        "audio": (None,),
        "best_of": (None, 1),
        "echo": (None, False),
        "function_call": (None, "none", "auto"),  # of functions, which are refused
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "web_search_options": (None,),
        **_OF_OTHERS,
    },
    CompletionRequest: {"add_special_tokens": (None, True), "best_of": (None, 1), "tools": (None, []), **_OF_OTHERS},
    ResponseRequest: {
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "logprobs": (None, False),
        "n": (None, 1),
        "prompt": (None,),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled", "auto"),  # a prompt that does not fit is refused
        **_OF_OTHERS,
    },
}

Body = TypeVar("Body", bound=msgspec.Struct)

IGNORED = Ignored()


def read_request(body: bytes, kind: type[Body]) -> Body:
    """Parse and check a body.

    Raises:
        ApiError: with status 400, naming the field that is wrong.
    """
    return read_fields(read_object(body), kind)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is. A byte order mark before it is skipped.

    Raises:
        ApiError: with status 400.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        check_json(body)
        fields = msgspec.json.decode(body)
    except TooDeep as error:
        raise ApiError(400, f"The body cannot be read: {error}. Make it flatter.", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not JSON: {one_line(error)}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "The body is not a JSON object.", code="invalid_type")
    return fields


def read_fields(fields: dict[str, Any], kind: type[Body]) -> Body:
    """The request that a JSON object is. It is changed.

    Raises:
        ApiError: with status 400, naming the field that is wrong.
    """
    known, neutral = set(kind.__struct_fields__), NEUTRAL.get(kind, {})
    fields, skipped = normalised(fields, known)
    ignored = [*skipped, *unread_keys(fields)]
    for name in list(fields):
        if name in known:
            continue
        if name in neutral:
            _check_neutral(name, fields[name], neutral[name])
        elif name in HARMLESS or fields[name] is None:
            ignored.append(name)
        else:
            close = _UNFOLDED if name == "extra_body" else nearest(name, known)
            raise ApiError(400, f"There is no field '{name[:100]}'. {close}", param=name[:100], code="unknown_field")
        del fields[name]
    IGNORED.add(ignored)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise bad_field(error) from error


def _check_neutral(name: str, value: object, values: tuple[Any, ...]) -> None:
    if not any(value == neutral and isinstance(value, type(neutral)) for neutral in values):
        raise ApiError(
            400,
            f"'{name}' is not supported by this server. {_IN_PLACE_OF.get(name, 'Leave it out')}.",
            param=name,
            code="unsupported_field",
        )
