"""Ollama's API below /api: the same answers in its words, as Home Assistant and plugins of editors ask for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeAlias

import msgspec

from outrider.decoding.results import Result
from outrider.inputs.vision.images import from_base64
from outrider.server.conversations import Conversations
from outrider.server.dialect import ChoicePiece, Dialect, News, Part, ServedAnswer, Wanted, first_choice
from outrider.server.errors import ApiError
from outrider.server.logprobs import chat_logprobs
from outrider.server.models import Model
from outrider.server.protocol.reading import as_request, as_text, read_fields, read_object
from outrider.server.protocol.requests import ChatRequest, CompletionRequest, LoadRequest
from outrider.server.text_encoders import TextEncoder
from outrider.types import TokenLogprobs

_MOST_IMAGES = 1_000
_BOTH = ("model", "stream", "format", "options", "think", "logprobs", "top_logprobs")
_CHAT = (*_BOTH, "messages", "tools")
_TEXT = (*_BOTH, "prompt", "suffix", "system", "template", "raw", "images")


def _read(body: bytes, known: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A body's fields, and those of the chat or the completion. Ones that Ollama does not have are read as there."""
    fields = read_object(body)
    if fields.pop("context", None):
        message = "'context' is not supported: no earlier prompts are kept. Send the conversation to /api/chat."
        raise ApiError(400, message, param="context", code="unsupported_field")
    unload = fields.get("keep_alive") in (0, "0", "0s")
    model = fields.get("model")
    made: dict[str, Any] = {
        **_options(fields.get("options") or {}),
        **{name: value for name, value in fields.items() if name not in known},
        "model": model.removesuffix(":latest") if isinstance(model, str) else model,
        "stream": fields.get("stream") is not False,
        **_format(fields.get("format")),
        **_thinking(fields.get("think")),
    }
    for name in ("logprobs", "top_logprobs"):
        if fields.get(name):
            made[name] = fields[name]
    if not any(fields.get(name) for name in ("messages", "prompt", "suffix", "images")):
        made = {"model": made["model"], "unload": unload}
    return fields, made


def _options(options: Any) -> dict[str, Any]:
    """Options as fields of a request, which has most of their names."""
    if not isinstance(options, Mapping):
        raise ApiError(400, "'options' is not an object.", param="options", code="invalid_type")
    return dict(options)


def _format(form: Any) -> dict[str, Any]:
    if form in (None, ""):
        return {}
    if form == "json":
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": form}}}


def _thinking(think: Any) -> dict[str, Any]:
    if isinstance(think, str):
        return {"reasoning_effort": think}
    return {} if think is None else {"enable_thinking": think}


def _turn(message: Any, place: int) -> Any:
    """A message as one of a chat: images beside the text become parts, and a call's arguments are an object."""
    if not isinstance(message, Mapping):
        return message
    turn = {name: message[name] for name in ("role", "content", "thinking", "tool_call_id") if name in message}
    if message.get("images"):
        turn["content"] = _parts(message.get("content") or "", message["images"], f"messages[{place}].images")
    if message.get("tool_calls"):
        turn["tool_calls"] = message["tool_calls"]
    if "tool_name" in message:
        turn["name"] = message["tool_name"]
    return turn


def _parts(text: Any, images: Any, place: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    images = images if isinstance(images, list) else [images]
    if len(images) > _MOST_IMAGES:
        message = f"{len(images):,} images are more than a message may have, {_MOST_IMAGES:,}. Send fewer."
        raise ApiError(400, message, param=place, code="invalid_value")
    for image in images:
        try:
            from_base64(as_text(image, place))
        except ValueError as error:
            raise ApiError(400, "An image is not base64.", param=place, code="invalid_type") from error
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}})
    return parts


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _to_chat(body: bytes, _: Conversations) -> Wanted:
    """What a body of /api/chat asks for."""
    fields, made = _read(body, _CHAT)
    if "unload" in made:
        return Wanted(as_request(made, LoadRequest))
    messages = fields.get("messages")
    turns = [_turn(message, i) for i, message in enumerate(messages)] if isinstance(messages, list) else messages
    return Wanted(read_fields(made | {"messages": turns, "tools": fields.get("tools")}, ChatRequest))


def _text_to_chat(body: bytes, _: Conversations) -> Wanted:
    """What a body of /api/generate asks for: a chat of its prompt, or a completion if it is raw."""
    fields, made = _read(body, _TEXT)
    if "unload" in made:
        return Wanted(as_request(made, LoadRequest))
    if fields.get("template"):
        message = "'template' is not supported: the model's own is used. Leave it out, or set raw to true."
        raise ApiError(400, message, param="template", code="unsupported_field")
    prompt = as_text(fields.get("prompt") or "", "prompt")
    if fields.get("raw") or fields.get("suffix"):
        made.pop("enable_thinking", None)
        made.pop("reasoning_effort", None)
        if made.get("logprobs"):
            made["logprobs"] = made.pop("top_logprobs", 0)
        return Wanted(read_fields(made | {"prompt": prompt, "suffix": fields.get("suffix")}, CompletionRequest))
    system = fields.get("system")
    content = _parts(prompt, fields["images"], "images") if fields.get("images") else prompt
    turns = [{"role": "system", "content": system}] if system else []
    return Wanted(read_fields(made | {"messages": [*turns, {"role": "user", "content": content}]}, ChatRequest))


def _message(model: str, **said: Any) -> dict[str, Any]:
    """A line of /api/chat."""
    return {"model": model, "created_at": _now(), "message": {"role": "assistant", "content": "", **said}}


def _response(model: str, content: str = "", thinking: str = "", **_: Any) -> dict[str, Any]:
    """A line of /api/generate."""
    thoughts = {"thinking": thinking} if thinking else {}
    return {"model": model, "created_at": _now(), "response": content, **thoughts}


Line: TypeAlias = Callable[..., dict[str, Any]]


def _loaded(request: LoadRequest, name: str) -> dict[str, Any]:
    """What Ollama answers to a request without a prompt."""
    reason = "unload" if request.unload else "load"
    return _message(name) | {"response": "", "done": True, "done_reason": reason}


def _body(line: Line, answer: ServedAnswer) -> dict[str, Any]:
    (said,), (result,) = answer.choices, answer.results
    calls = [call for part in said.parts for call in _call(part)]
    fields: dict[str, Any] = {"content": said.text, "thinking": said.thoughts, "tool_calls": calls}
    message = line(answer.head.model, **{name: value for name, value in fields.items() if value})
    return message | _ended(result) | _logprobs(answer, result.logprobs)


def _events(line: Line, answer: ServedAnswer, step: ChoicePiece) -> Iterator[dict[str, Any]]:
    """What a piece adds; calls are given out when they are complete."""
    model, logprobs = answer.head.model, _logprobs(answer, step.chunk.logprobs)
    said = [fields for news in step.news if (fields := _said(news))]
    for fields in said or ([{}] if logprobs else []):
        yield line(model, **fields) | {"done": False} | logprobs
        logprobs = {}  # they come with the first of these lines
    if step.chunk.result:
        yield line(model) | _ended(step.chunk.result)


def _said(news: News) -> dict[str, Any]:
    if news.kind == "grown" and news.part.kind != "call":
        return {"thinking" if news.part.kind == "thought" else "content": news.text}
    calls = _call(news.part) if news.kind == "ended" else []
    return {"tool_calls": calls} if calls else {}


def _call(part: Part) -> list[dict[str, Any]]:
    """A call with its arguments as an object; none of one that was cut."""
    if part.kind != "call":
        return []
    try:
        return [{"function": {"name": part.name, "arguments": msgspec.json.decode(part.text or "{}")}}]
    except msgspec.DecodeError:
        return []


def _logprobs(answer: ServedAnswer, tokens: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
    return {"logprobs": chat_logprobs(tokens, answer.head.texts)} if tokens else {}


def _ended(result: Result) -> dict[str, Any]:
    stats = result.stats
    prompt, answer = int(stats.time_to_first_token * 1e9), int(stats.decode_seconds * 1e9)
    return {
        "done": True,
        "done_reason": "length" if result.finish_reason == "length" else "stop",
        "total_duration": prompt + answer,
        "load_duration": 0,
        "prompt_eval_count": stats.num_prompt_tokens,
        "prompt_eval_duration": prompt,
        "eval_count": stats.num_generated_tokens,
        "eval_duration": answer,
    }


def _ping(line: Line, model: str) -> dict[str, Any]:
    return line(model) | {"done": False}


def _dialect(path: str, to_chat: Callable[[bytes, Conversations], Wanted], line: Line) -> Dialect:
    return Dialect(
        path, "ollama-", to_chat, partial(_events, line), partial(_body, line),
        ping=partial(_ping, line), choices=first_choice, loaded=_loaded, lines=True,
    )  # fmt: skip


OLLAMA_CHAT = _dialect("/api/chat", _to_chat, _message)
OLLAMA_TEXT = _dialect("/api/generate", _text_to_chat, _response)


def tag_of(model: Model | TextEncoder) -> dict[str, Any]:
    """A model in /api/tags."""
    info, manifest = model.info, model.bundle.manifest
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": datetime.fromtimestamp(info.created, UTC).isoformat(),
        "size": manifest.size,
        "digest": model.fingerprint.removeprefix("outrider-").ljust(64, "0"),
        "details": details_of(model),
    }


def running(model: Model | TextEncoder, idle_seconds: float | None) -> dict[str, Any]:
    """A model in /api/ps. idle_seconds: after which it is unloaded; None: never, for which a date has to do as well."""
    tag, device = tag_of(model), model.device if isinstance(model, TextEncoder) else model.config.device.main_device
    expires = datetime(9999, 12, 31, tzinfo=UTC)
    if idle_seconds is not None:
        unused = 0.0 if model.num_users else time.monotonic() - model.last_used
        expires = datetime.now(UTC) + timedelta(seconds=idle_seconds - unused)
    on_gpu = device.startswith("GPU")
    return tag | {
        "expires_at": expires.isoformat(), "size_vram": tag["size"] if on_gpu else 0,
        "context_length": model.info.max_model_len,
    }  # fmt: skip


def details_of(model: Model | TextEncoder) -> dict[str, Any]:
    """What Ollama says of a model's kind."""
    main = model.bundle.manifest.main
    family = main.geometry.architecture
    return {
        "parent_model": "", "format": "outrider", "family": family, "families": [family], "parameter_size": "",
        "quantization_level": main.weights,
    }  # fmt: skip


def shown(model: Model | TextEncoder) -> dict[str, Any]:
    """A model in /api/show."""
    info, main = model.info, model.bundle.manifest.main
    family = main.geometry.architecture
    abilities = {"tools": info.tools, "thinking": info.reasoning, "vision": info.vision}
    capabilities = ["completion", *(name for name, has in abilities.items() if has)]
    if isinstance(model, TextEncoder):
        capabilities = ["embedding"] if model.kind == "embedding" else []
    template = "" if isinstance(model, TextEncoder) else model.chat_templates.default
    return {
        "modelfile": "", "parameters": "", "template": template, "details": details_of(model),
        "model_info": {
            "general.architecture": family, f"{family}.context_length": info.max_model_len,
            "general.basename": model.name, f"{family}.embedding_length": main.geometry.hidden_size,
        },
        "capabilities": capabilities,
    }  # fmt: skip
