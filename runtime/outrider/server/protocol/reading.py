"""Reads the bodies of requests.

Fields of other APIs that cannot change an answer are ignored, and listed once in the log. Those that would, and
are not implemented here, are accepted with a value that changes nothing, and refused by name with others.
"""

from __future__ import annotations

import codecs
import difflib
import re
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
    "adaptive_decay", "anthropic_version", "api_base", "api_key", "backend_sampling", "base_url", "cache",
    "cache_prompt", "cache_reuse", "cache_salt", "caching", "chat_id", "client_metadata",
    "context_length_exceeded_behavior", "conversation_id", "custom_llm_provider", "details", "drop_params",
    "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent", "extra",
    "guided_decoding_backend", "id", "id_slot", "include", "incremental_output", "keep_alive", "litellm_metadata",
    "max_context_length", "max_retries", "max_tool_calls", "message_id", "metadata", "mirostat_eta", "mirostat_tau",
    "models", "n_discard", "n_keep", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_retries", "num_thread", "nwo",
    "parent_id", "penalize_nl", "perf_metrics_in_response", "priority", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "provider", "request_id", "request_timeout", "return_progress", "rid", "route",
    "safety_identifier", "safety_settings", "service_tier", "session_id", "session_params", "slot_id",
    "spaces_between_special_tokens", "speculative", "speculative.n_max", "speculative.n_min", "speculative.p_min",
    "store", "stream_reasoning", "tags", "timeout", "timings_per_token", "tool_stream", "trace", "trace_id",
    "truncation_length", "ttl", "usage", "user", "user_id", "xtc_threshold",
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
    "add_bos_token": (None, True),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "detokenize": (None, True),
    "dry_multiplier": (None, 0, 0.0),
    "dynamic_temperature": (None, False),
    "dynatemp_range": (None, 0, 0.0),
    "early_stopping": (None, False),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "guidance_scale": (None, 1, 1.0),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1, 1.0),
    "lora": (None, []),
    "min_keep": (None, 0),
    "mirostat": _NO_MIROSTAT,
    "mirostat_mode": _NO_MIROSTAT,
    "n_probs": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "parse_tool_calls": (None, True),
    "penalty_alpha": (None, 0, 0.0),
    "plugins": (None, []),
    "post_sampling_probs": (None, False),
    "prompt_logprobs": (None, 0),
    "result_format": (None, "message"),
    "return_token_ids": (None, False),
    "safe_prompt": (None, False),
    "samplers": (None, []),
    "separate_reasoning": (None, True),
    "skew": (None, 0, 0.0),
    "skip_special_tokens": (None, True),
    "smoothing_factor": (None, 0, 0.0),
    "t_max_predict_ms": (None, 0, -1),
    "tfs": (None, 1, 1.0),
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

OFF: tuple[Any, ...] = (None, "", [], {})  # values with which a field that is not known asks for nothing
_MISSPELT = 0.8  # similarity, of at most 1, from which on a name is taken for another one

Body = TypeVar("Body", bound=msgspec.Struct)

IGNORED = Ignored()
# An escaped backslash, a pair, or one half of it alone.
_SURROGATE = re.compile(
    rb"(\\\\)|(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)


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
        fields = _decoded(body)
    except TooDeep as error:
        raise ApiError(400, f"The body cannot be read: {error}. Make it flatter.", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not JSON: {one_line(error)}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "The body is not a JSON object.", code="invalid_type")
    return fields


def _decoded(body: bytes) -> Any:
    """The value of a body. Halves of a character, which JavaScript's texts may have where they were cut, are U+FFFD."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        mended = _SURROGATE.sub(lambda found: found[0] if found[1] or found[2] else b"\\ufffd", body)
        if mended == body:
            raise
        return msgspec.json.decode(mended)


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
        elif name in HARMLESS or _is_off(name, fields[name], kind):
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


def _is_off(name: str, value: object, kind: type[Body]) -> bool:
    """Whether a value that nobody reads asks for nothing. false does, unless the name is that of a flag, misspelt."""
    if value is False:
        flags = [field.name for field in msgspec.structs.fields(kind) if field.type == bool | None]
        return not difflib.get_close_matches(name, flags, n=1, cutoff=_MISSPELT)
    return any(value == each and type(value) is type(each) for each in OFF)


def _check_neutral(name: str, value: object, values: tuple[Any, ...]) -> None:
    if not any(value == neutral and isinstance(value, type(neutral)) for neutral in values):
        raise ApiError(
            400,
            f"'{name}' is not supported by this server. {_IN_PLACE_OF.get(name, 'Leave it out')}.",
            param=name,
            code="unsupported_field",
        )
