"""llama.cpp's /completion and /infill, as editors and scripts ask for them: the same answers in its words.

Source: tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from outrider.decoding.results import AnswerToken, Result
from outrider.server.conversations import Conversations
from outrider.server.dialect import ChoicePiece, Dialect, ServedAnswer, ServedChoice, Wanted, choices_of
from outrider.server.errors import ApiError
from outrider.server.infill import Infill
from outrider.server.options import AnswerChoice, AnswerLimit
from outrider.server.protocol.loose import IGNORED
from outrider.server.protocol.reading import as_text, read_fields, read_object
from outrider.server.protocol.requests import CompletionRequest
from outrider.server.usage import timings_of

# Samplers that do not change which token is the likeliest; penalties are options of their own.
_SAMPLERS = {"top_k", "top_p", "min_p", "typ_p", "typical_p", "temperature", "penalties", "dry", "xtc", "infill"}
_OWN = ("t_max_predict_ms", "return_tokens")
_UNREAD = ("n_indent", "response_fields")  # which only shorten an answer


def _to_chat(body: bytes, _: Conversations) -> Wanted:
    """The completion that a body of /completion asks for."""
    return _completion_of(read_object(body))


def _completion_of(fields: dict[str, Any]) -> Wanted:
    others = {name: fields.pop(name, None) for name in _OWN}
    IGNORED.add([name for name in _UNREAD if fields.pop(name, None)])
    for name in ("n_probs", "logprobs"):
        if fields.pop(name, None):
            message = f"'{name}' is not supported here. Send logprobs to /v1/completions."
            raise ApiError(400, message, param=name, code="unsupported_field")
    if "n_cmpl" in fields:
        fields["n"] = fields.pop("n_cmpl")
    fields["prompt"] = _prompt(fields.get("prompt"))
    _check_samplers(fields)
    return Wanted(read_fields(fields, CompletionRequest), others)


def _infill_to_chat(body: bytes, _: Conversations) -> Wanted:
    """The completion that a body of /infill asks for: what is between a prefix and a suffix."""
    fields = read_object(body)
    given = {name: fields.pop(name, None) for name in ("input_prefix", "input_suffix", "input_extra")}
    before, after = (as_text(given[name] or "", name) for name in ("input_prefix", "input_suffix"))
    files = _files(given["input_extra"] or [])
    wanted = _completion_of({"prompt": "", **fields})
    prompt = wanted.request.prompt if isinstance(wanted.request, CompletionRequest) else ""
    if not isinstance(prompt, str):
        raise ApiError(400, "The prompt of /infill is not a text.", param="prompt", code="invalid_type")
    infill = Infill(before, after, begun=prompt, files=files, field="input_suffix")
    return replace(wanted, own={**wanted.own, "infill": infill})


def _choices(wanted: Wanted) -> list[AnswerChoice]:
    """The answers to each prompt."""
    choices = choices_of(wanted)
    if (infill := wanted.own.get("infill")) is not None:
        choices = [replace(choice, prompt=infill) for choice in choices]
    milliseconds = _number(wanted.own, "t_max_predict_ms")
    return [replace(choice, limit=AnswerLimit(milliseconds)) for choice in choices] if milliseconds > 0 else choices


def _body(answer: ServedAnswer) -> Any:
    """The answer in one body, or a list of them for several prompts."""
    bodies = [_ended(answer, said, said.result, said.result.text) for said in answer.choices if said.result]
    return bodies[0] if len(bodies) == 1 else bodies


def _events(answer: ServedAnswer, step: ChoicePiece) -> Iterator[dict[str, Any]]:
    said, chunk = step.said, step.chunk
    if chunk.text or chunk.tokens:
        yield _piece(said.number, chunk.text, chunk.tokens)
    if chunk.result:
        yield _ended(answer, said, chunk.result, "")


def _progress(_: ServedAnswer, number: int, progress: dict[str, Any]) -> dict[str, Any]:
    return _piece(number, "", ()) | {"prompt_progress": progress}


def _piece(number: int, text: str, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
    return {"index": number, "content": text, "tokens": [token.token_id for token in tokens], "stop": False}


def _ended(answer: ServedAnswer, said: ServedChoice, result: Result, text: str) -> dict[str, Any]:
    """The last event, or the whole answer."""
    prompt, stats, request = said.choice.prompt, result.stats, answer.request
    tokens = result.tokens if answer.own["return_tokens"] and not request.stream else []
    kind = "word" if result.stop_string else "eos"
    return _piece(said.number, text, tokens) | {
        "id_slot": 0,
        "stop": True,
        "model": answer.head.model,
        "tokens_predicted": stats.num_generated_tokens,
        "tokens_evaluated": stats.num_prompt_tokens,
        "tokens_cached": stats.num_prompt_tokens + stats.num_generated_tokens,
        "generation_settings": _settings(request) | {"seed": result.seed},
        "prompt": _shown(prompt, answer),
        "has_new_line": "\n" in result.text,
        "truncated": False,  # a prompt that does not fit is refused
        "stop_type": kind if result.finish_reason == "stop" else "limit",
        "stopping_word": result.stop_string or "",
        "timings": timings_of([stats]),
    }


def _shown(prompt: Any, answer: ServedAnswer) -> str:
    if isinstance(prompt, Infill):
        return prompt.before
    return prompt if isinstance(prompt, str) else answer.head.texts.spelled(prompt)


def _prompt(prompt: Any) -> Any:
    """A prompt that is not an object with images, nor text and token ids in one."""
    if isinstance(prompt, Mapping) and not prompt.get("multimodal_data"):
        return prompt.get("prompt_string")
    if isinstance(prompt, Mapping):
        message = "Images in a text are not supported. Send them to /v1/chat/completions."
        raise ApiError(400, message, param="prompt.multimodal_data", code="unsupported_field")
    if isinstance(prompt, list):
        if {int, str} <= {type(each) for each in prompt}:
            message = "A prompt of texts and token ids in one is not supported. Send one of them."
            raise ApiError(400, message, param="prompt", code="unsupported_field")
        return [_prompt(each) if isinstance(each, Mapping) else each for each in prompt]
    return prompt


def _check_samplers(fields: dict[str, Any]) -> None:
    """Leave out the names and the order of samplers where the likeliest token is taken: also without a temperature."""
    samplers = fields.get("samplers")
    if isinstance(samplers, list) and {*map(str, samplers)} <= _SAMPLERS and not fields.get("temperature"):
        IGNORED.add(["samplers"])
        del fields["samplers"]
        fields["temperature"] = 0.0  # whatever the server's default is


def _number(others: Mapping[str, Any], name: str) -> float:
    value = others[name] or 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ApiError(400, f"'{name}' is not a number.", param=name, code="invalid_type")
    return value


def _files(given: Any) -> list[tuple[str, str]]:
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        raise ApiError(400, "'input_extra' is not a list of objects.", param="input_extra", code="invalid_type")
    places = [(each, f"input_extra[{i}]") for i, each in enumerate(given)]
    return [
        (as_text(each.get("filename") or "tmp", f"{place}.filename"), as_text(each.get("text") or "", f"{place}.text"))
        for each, place in places
    ]


def _settings(request: CompletionRequest) -> dict[str, Any]:
    """The options that the request has, by its names."""
    fields = msgspec.to_builtins(request)
    return {name: value for name, value in fields.items() if name not in ("prompt", "model") and value is not None}


COMPLETION = Dialect("/completion", "llama-", _to_chat, _events, _body, progress=_progress, choices=_choices)
INFILL = replace(COMPLETION, path="/infill", to_chat=_infill_to_chat)
