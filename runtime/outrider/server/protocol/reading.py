"""Reads the bodies of requests.

Fields of other APIs that would change an answer, and are not implemented here, are accepted with a value that changes
nothing, and refused by name with others. So is a name that is nearly one of this server's. All other fields are
ignored, and listed once in the log, as llama.cpp, vLLM, LM Studio and Ollama ignore them.
"""

from __future__ import annotations

import codecs
import difflib
import re
from functools import cache, lru_cache
from typing import Any, TypeVar

import msgspec

from outrider.errors import one_line
from outrider.server.errors import ApiError, bad_field
from outrider.server.protocol.items import ResponseRequest
from outrider.server.protocol.loose import IGNORED, SAME, normalised
from outrider.server.protocol.requests import ChatRequest, CompletionRequest
from outrider.system.nesting import TooDeep, TooMany, check_json, check_num_values

# Fields of others that are no field of this server, misspelt.
_OTHERS = ("mode", "models", "speed", "topic")
# What a client may do in place of sending a field that is refused.
_SEND_SYSTEM = "Send a message of the role system"
_SEND_IMAGES = "Send images as parts of a message"
_CONTINUE = "End with a message of the assistant, which is continued"
_UNFOLD = "Send the fields within it themselves"  # as OpenAI's Python client does with `extra_body`
_IN_PLACE_OF = {
    "assistant_prefix": _CONTINUE, "best_of": "Send n", "extra_body": _UNFOLD, "format": "Send response_format",
    "function_call": "Send tool_choice", "functions": "Send tools", "generation_config": _UNFOLD,
    "image_data": _SEND_IMAGES, "images": _SEND_IMAGES, "instructions": _SEND_SYSTEM,
    "max_length": "Send max_tokens", "messages": "Send them to /v1/chat/completions", "n_probs": "Send top_logprobs",
    "options": _UNFOLD, "parameters": _UNFOLD, "prefill": _CONTINUE, "prompt": "Send its text as a message",
    "response_schema": "Send response_format", "sampling_params": _UNFOLD, "system": _SEND_SYSTEM,
    "system_prompt": _SEND_SYSTEM,
}  # fmt: skip
OFF: tuple[Any, ...] = (None, False, "", [], {}, 0)  # values with which a field asks for nothing
# Samplers and the like of other servers that would change an answer, and are not implemented.
_OF_OTHERS = {
    "adaptive_target", "allowed_token_ids", "auto_max_new_tokens", "bad_words", "best_of", "chat_template",
    "custom_token_bans", "dry_multiplier", "dynamic_temperature", "dynatemp_range", "early_stopping", "enable_search",
    "epsilon_cutoff", "eta_cutoff", "extra_body", "files", "format", "generation_config", "guided_choice",
    "guided_json", "guided_json_object", "image_data", "images", "include_stop_str_in_output", "logits_processors",
    "lora", "max_length", "mcp_servers", "min_keep", "mirostat", "mirostat_mode", "n_probs", "negative_prompt",
    "no_repeat_ngram_size", "options", "parameters", "penalty_alpha", "plugins", "post_sampling_probs",
    "prompt_embeds", "prompt_logprobs", "response_schema", "result_format", "return_token_ids", "safe_prompt",
    "samplers", "sampling_params", "search_parameters", "skew", "smoothing_factor", "structural_tag",
    "structured_outputs", "system", "system_prompt", "t_max_predict_ms", "temperature_last", "template", "top_a",
    "top_n_sigma", "transforms", "truncate_prompt_tokens", "use_beam_search", "watermark", "xtc_probability",
}  # fmt: skip
# The values of these with which they change nothing, beside `OFF`; and of those for which that is not one.
_ALSO: dict[str, tuple[Any, ...]] = {
    "adaptive_target": (-1,), "best_of": (1,), "function_call": ("none", "auto"), "modalities": (["text"],), "n": (1,),
    "result_format": ("message",), "t_max_predict_ms": (-1,), "top_n_sigma": (-1,), "truncation": ("disabled", "auto"),
}  # fmt: skip
_ON: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "add_bos_token", "detokenize", "parse_tool_calls", "separate_reasoning", "skip_special_tokens",
    ), (None, True)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "length_penalty", "num_beams", "tfs", "tfs_z"),
                    (None, 1)),
}  # fmt: skip


def _neutral(*names: str) -> dict[str, tuple[Any, ...]]:
    return {name: OFF + _ALSO.get(name, ()) for name in (*names, *_OF_OTHERS)} | _ON


# Fields that would change an answer and are not implemented, by the kind of request: the values with which they change
# nothing.
NEUTRAL: dict[type[msgspec.Struct], dict[str, tuple[Any, ...]]] = {
    ChatRequest: _neutral(
        "add_special_tokens", "assistant_prefix", "audio", "echo", "function_call", "functions", "input",
        "instructions", "modalities", "prefill", "prompt", "suffix",
    ) | {"web_search_options": (None,)},
    CompletionRequest: _neutral("messages", "tools") | {"add_special_tokens": (None, True)},
    ResponseRequest: _neutral(
        "background", "context_management", "conversation", "echo", "logprobs", "messages", "n", "prompt", "truncation",
    ),
}  # fmt: skip

_MISSPELT = 0.8  # similarity, of at most 1, from which on a name is taken for another one
_LONGEST_NAME = 40  # characters; that of a field has 30 at most
_MOST_UNKNOWN = 100  # fields that are compared with all known ones, which takes a millisecond for each
_CAPITAL = re.compile("(?<=[a-z])[A-Z]")

Body = TypeVar("Body", bound=msgspec.Struct)

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
    if not body.strip():
        raise ApiError(400, "The body is empty. Send a JSON object.", code="invalid_json")
    try:
        check_num_values(body)
        check_json(body)
        fields = _decoded(body)
    except (TooDeep, TooMany) as error:
        raise ApiError(400, f"The body cannot be read: {error}. Make it smaller.", code="invalid_json") from error
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
    unknown = [name for name in fields if name not in known and name not in neutral]
    if len(unknown) > _MOST_UNKNOWN:
        message = f"{len(unknown):,} of the fields are none of this server's, and {_MOST_UNKNOWN} are ignored."
        raise ApiError(400, f"{message} Leave them out.", code="unknown_field")
    for name in [name for name in fields if name not in known]:
        if name in neutral:
            _check_neutral(name, fields[name], neutral[name])
        else:
            _check_spelling(name, fields[name], kind)
        del fields[name]
    IGNORED.add([*skipped, *unknown])
    return as_request(fields, kind)


def as_request(fields: dict[str, Any], kind: type[Body]) -> Body:
    """The request that fields are which it has. Raises as `read_fields`."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise bad_field(error) from error


def as_text(value: Any, name: str) -> str:
    """A field's value. Raises ApiError with status 400 unless it is a text."""
    if not isinstance(value, str):
        raise ApiError(400, f"'{name}' is not a text. Send a text.", param=name, code="invalid_type")
    return value


def _check_spelling(name: str, value: object, kind: type[Body]) -> None:
    """Refuse a name that is nearly one of a request's fields, unless its value asks for nothing; false asks a flag."""
    if name in _OTHERS or len(name) > _LONGEST_NAME or value is None or value in ("", [], {}):
        return
    if meant := _nearest(name, kind, flags=value is False):
        raise ApiError(400, f"There is no field '{name}'. Did you mean '{meant}'?", param=name, code="unknown_field")


@lru_cache(1024)
def _nearest(name: str, kind: type[msgspec.Struct], *, flags: bool) -> str | None:
    """The field of a request, or of its flags alone, that a name is nearly the one of."""
    written = _CAPITAL.sub(r"_\g<0>", name).lower()  # topP as top_p
    return next(iter(difflib.get_close_matches(written, _names_of(kind, flags=flags), n=1, cutoff=_MISSPELT)), None)


@cache
def _names_of(kind: type[msgspec.Struct], *, flags: bool) -> list[str]:
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    fields |= {other: fields[own] for other, own in SAME.items() if own in fields}
    return [name for name, type_ in fields.items() if not flags or type_ == bool | None]


def _check_neutral(name: str, value: object, values: tuple[Any, ...]) -> None:
    if value not in values:
        raise ApiError(
            400,
            f"'{name}' is not supported by this server. {_IN_PLACE_OF.get(name, 'Leave it out')}.",
            param=name,
            code="unsupported_field",
        )
