"""LM Studio's addresses below /api/v0 and /api/v1: the same answers, with its words about models and speed.

Source: docs/developer/rest of lmstudio.ai (0.4).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from outrider import __version__
from outrider.decoding.results import Result, TextChunk
from outrider.inputs.reasoning import Thought
from outrider.server.answers import AnswerHead, SingleAnswer, WrappedRequest
from outrider.server.chat import ChatAnswer, reading_of
from outrider.server.completions import Completions
from outrider.server.conversations import Conversations
from outrider.server.endpoint import Endpoint, NamedEvent, Service, as_json, read_json
from outrider.server.errors import ApiError
from outrider.server.models import Model
from outrider.server.options import AnswerChoice, choices_of_chat
from outrider.server.protocol.reading import IGNORED, as_text, read_fields, read_object
from outrider.server.protocol.requests import ChatRequest
from outrider.server.text_encoders import TextEncoder

_STOPS = {"length": "maxPredictedTokensReached", "cancelled": "userStopped", "tool_calls": "toolCalls"}
_LOAD_OPTIONS = (
    "context_length", "eval_batch_size", "flash_attention", "num_experts", "offload_kv_cache_to_gpu", "parallel", "ttl",
)  # fmt: skip
_CHAT = (
    "model", "input", "system_prompt", "stream", "temperature", "top_p", "top_k", "min_p", "repeat_penalty",
    "max_output_tokens", "reasoning", "store", "previous_response_id", "seed", "draft_model", "drafter",
)  # fmt: skip


def lmstudio_routes(service: Service) -> list[BaseRoute]:
    """The addresses, but for that of embeddings."""
    return [
        Route("/api/v0/models", partial(_models, service)),
        Route("/api/v0/models/{name:path}", partial(_model, service)),
        Route("/api/v0/chat/completions", Endpoint(service, LmStudioChatCompletion), methods=["POST"]),
        Route("/api/v0/completions", Endpoint(service, LmStudioCompletion), methods=["POST"]),
        Route("/api/v1/models", partial(_models_now, service)),
        Route("/api/v1/models/load", partial(_load, service), methods=["POST"]),
        Route("/api/v1/models/unload", partial(_unload, service), methods=["POST"]),
        Route("/api/v1/chat", Endpoint(service, LmStudioChat), methods=["POST"]),
    ]


def _kind_of(model: Model | TextEncoder) -> str:
    info = model.info
    return ("vlm" if info.vision else "llm") if info.type == "llm" else info.type


async def _models(service: Service, _: Request) -> Response:
    return as_json({"object": "list", "data": [_shown(model) for model in service.models.served]})


async def _model(service: Service, request: Request) -> Response:
    return as_json(_shown(_find(service, request.path_params["name"])))


def _find(service: Service, name: str) -> Model | TextEncoder:
    return service.models.encoders.by_name.get(name) or service.models.find(name)


def _shown(model: Model | TextEncoder) -> dict[str, Any]:
    """A model in /api/v0/models."""
    info = model.info
    made = {
        "id": info.id, "object": "model", "type": _kind_of(model), "publisher": "", "arch": info.architecture,
        "compatibility_type": "openvino", "quantization": info.quantization,
        "state": "loaded" if info.loaded else "not-loaded", "max_context_length": info.max_model_len,
    }  # fmt: skip
    abilities = ["tool_use"] if info.tools else []
    return made | ({"capabilities": abilities} if info.type == "llm" else {})


async def _models_now(service: Service, _: Request) -> Response:
    return as_json({"models": [_shown_now(service, model) for model in service.models.served]})


def _shown_now(service: Service, model: Model | TextEncoder) -> dict[str, Any]:
    """A model in /api/v1/models."""
    info, is_llm = model.info, model.info.type == "llm"
    config = {"context_length": info.max_model_len} | ({"parallel": service.queue.max_running} if is_llm else {})
    made: dict[str, Any] = {
        "type": "llm" if is_llm else "embedding" if info.type == "embeddings" else info.type,
        "publisher": "", "key": info.id, "display_name": info.id,
        "quantization": {"name": info.quantization, "bits_per_weight": _bits_of(info.quantization)},
        "size_bytes": model.bundle.manifest.size, "params_string": None,
        "loaded_instances": [{"id": info.id, "config": config}] if info.loaded else [],
        "max_context_length": info.max_model_len, "format": None,
    }  # fmt: skip
    if is_llm:
        reasoning = {"reasoning": {"allowed_options": ["off", "on"], "default": "on"}} if info.reasoning else {}
        abilities = {"vision": info.vision, "trained_for_tool_use": info.tools} | reasoning
        made |= {"architecture": info.architecture, "capabilities": abilities, "description": None}
    return made


def _bits_of(weights: str) -> int | None:
    return next((bits for name, bits in (("4", 4), ("8", 8), ("16", 16), ("32", 32)) if weights.endswith(name)), None)


async def _load(service: Service, request: Request) -> Response:
    """Load a model. Its options are those of the server's start."""
    fields = await read_json(service, request)
    echo = fields.pop("echo_load_config", False)
    IGNORED.add(f"{name} of a load" for name in _LOAD_OPTIONS if fields.pop(name, None) is not None)
    name = _only_field(fields, "model")
    model, began = _find(service, name), time.monotonic()
    if isinstance(model, TextEncoder):
        async with service.models.encoders.use(model):
            pass
    else:
        async with service.models.use(model):
            pass
    seconds = time.monotonic() - began
    body = {"type": "llm" if isinstance(model, Model) else "embedding", "instance_id": model.name, "status": "loaded"}
    config = {"load_config": {"context_length": model.info.max_model_len}} if echo else {}
    return as_json(body | {"load_time_seconds": round(seconds, 3)} | config)


async def _unload(service: Service, request: Request) -> Response:
    """Unload a model, unless somebody uses it."""
    model = _find(service, _only_field(await read_json(service, request), "instance_id"))
    if isinstance(model, Model):
        await service.models.unload(model)
    else:
        await service.models.encoders.unload_idle(0.0)
    return as_json({"instance_id": model.name})


def _only_field(fields: dict[str, Any], name: str) -> str:
    value = fields.pop(name, None)
    for other in fields:
        message = f"There is no field '{other[:100]}'. Leave it out."
        raise ApiError(400, message, param=other[:100], code="unknown_field")
    return as_text(value, name)


def _added(head: AnswerHead, results: Sequence[Result], *, calls: bool = False) -> dict[str, Any]:
    """What /api/v0 says besides the answer."""
    result = max(results, key=lambda each: each.stats.decode_seconds)
    stats, info = result.stats, head.info
    reason = "toolCalls" if calls else _STOPS.get(result.finish_reason)
    return {
        "stats": {
            "tokens_per_second": _speed_of(result),
            "time_to_first_token": stats.time_to_first_token,
            "generation_time": stats.decode_seconds,
            "stop_reason": reason or ("stopStringFound" if result.stop_string else "eosFound"),
        },
        "model_info": {
            "arch": info.architecture, "quant": info.quantization, "format": "openvino",
            "context_length": info.max_model_len,
        } if info else {},
        "runtime": {"name": "outrider", "version": __version__, "supported_formats": ["openvino", "onnx"]},
    }  # fmt: skip


def _speed_of(result: Result) -> float:
    stats = result.stats
    return stats.num_generated_tokens / stats.decode_seconds if stats.decode_seconds else 0.0


class LmStudioChatCompletion(ChatAnswer):
    """The answer to /api/v0/chat/completions."""

    def whole(self, results: Sequence[Result]) -> Any:
        """All choices in one body."""
        body = msgspec.to_builtins(super().whole(results))
        calls = any(choice["finish_reason"] == "tool_calls" for choice in body["choices"])
        return body | _added(self.head, results, calls=calls)

    def events(self, number: int, chunk: TextChunk) -> Iterator[Any]:
        """The events for a piece of a choice."""
        for event in super().events(number, chunk):
            yield _with_stats(event, self.head, chunk)


class LmStudioCompletion(Completions):
    """The answer to /api/v0/completions."""

    def whole(self, results: Sequence[Result]) -> Any:
        """All choices in one body."""
        return msgspec.to_builtins(super().whole(results)) | _added(self.head, results)

    def events(self, number: int, chunk: TextChunk) -> Iterator[Any]:
        """The events for a piece of a choice."""
        for event in super().events(number, chunk):
            yield _with_stats(event, self.head, chunk)


def _with_stats(event: Any, head: AnswerHead, chunk: TextChunk) -> Any:
    """An event; the one that says why a choice has ended says how fast it was, too."""
    reasons = [choice.finish_reason for choice in event.choices if choice.finish_reason]
    if not reasons or chunk.result is None:
        return event
    return msgspec.to_builtins(event) | _added(head, [chunk.result], calls="tool_calls" in reasons)


class LmStudioChat(SingleAnswer[ChatRequest]):
    """The answer to /api/v1/chat: a text or images, after an earlier answer."""

    kind = ChatRequest
    prefix = "resp_"

    def __init__(self, request: Any, head: AnswerHead, choices: Sequence[AnswerChoice]) -> None:
        super().__init__(request.own, head, choices, reading_of(request.own, head))
        self._others: Mapping[str, Any] = request.others
        self._turns = choices[0].turns
        self._output: list[dict[str, str]] = []  # the last one may grow still

    @classmethod
    def read(cls, body: bytes) -> WrappedRequest[ChatRequest]:
        """The chat that a body asks for."""
        fields = read_object(body)
        if fields.pop("integrations", None):
            message = "'integrations' is not supported: no tools run here. Send tools to /v1/chat/completions."
            raise ApiError(400, message, param="integrations", code="unsupported_field")
        IGNORED.add(name for name in ("context_length",) if fields.pop(name, None) is not None)
        for name in fields:
            if name not in _CHAT:
                message = f"There is no field '{name[:100]}' in LM Studio's API. Leave it out."
                raise ApiError(400, message, param=name[:100], code="unknown_field")
        system, given, reasoning = (fields.pop(name, None) for name in ("system_prompt", "input", "reasoning"))
        stored, previous = fields.pop("store", None), fields.pop("previous_response_id", None)
        if previous is not None:
            as_text(previous, "previous_response_id")
        if "max_output_tokens" in fields:
            fields["max_tokens"] = fields.pop("max_output_tokens")
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": _content(given)})
        chat = read_fields(fields | _reasoning(reasoning) | {"messages": messages}, ChatRequest)
        return WrappedRequest(chat, {"previous": previous, "is_stored": stored is not False})

    @staticmethod
    def choices(request: Any, conversations: Conversations) -> list[AnswerChoice]:
        """The one answer."""
        (choice,) = choices_of_chat(request.own)
        previous = request.others["previous"]
        before = [] if previous is None else conversations.turns(previous)
        turns: list[Any] = list(choice.prompt)
        system = [turn for turn in turns if turn["role"] == "system"] or [t for t in before if t["role"] == "system"]
        others = [turn for turn in (*before, *turns) if turn["role"] != "system"]
        turns = [*system, *others]
        return [AnswerChoice(turns, choice.options, turns)]

    def whole(self, results: Sequence[Result]) -> Any:
        """The answer in one body."""
        (result,) = results
        for _ in self._read(result.text, result, thinks=result.thinks):
            pass
        return self._ended(result)

    def begin(self) -> Iterator[Any]:
        """That the answer has begun: the prompt is read, as the first piece is there."""
        yield NamedEvent(type="chat.start", model_instance_id=self.head.model)
        yield NamedEvent(type="prompt_processing.start")
        yield NamedEvent(type="prompt_processing.end")

    def events(self, number: int, chunk: TextChunk) -> Iterator[Any]:  # noqa: ARG002
        """What a piece adds."""
        yield from self._read(chunk.text, chunk.result, thinks=chunk.thinks)
        if chunk.result:
            yield NamedEvent(type="chat.end", result=self._ended(chunk.result))

    def failure(self, error: ApiError) -> Any:
        """The event that ends a stream which fails."""
        body = error.body.error
        return NamedEvent(type="error", error={"type": "unknown", "message": body.message, "code": body.code})

    def _read(self, text: str, result: Result | None, *, thinks: bool) -> Iterator[NamedEvent]:
        for piece in self._pieces(text, result, thinks=thinks):
            kind, added = ("reasoning", piece.text) if isinstance(piece, Thought) else ("message", str(piece))
            if not self._output or self._output[-1]["type"] != kind:
                yield from self._end_item()
                self._output.append({"type": kind, "content": ""})
                yield NamedEvent(type=f"{kind}.start")
            self._output[-1]["content"] += added
            yield NamedEvent(type=f"{kind}.delta", content=added)
        if result:
            yield from self._end_item()

    def _end_item(self) -> Iterator[NamedEvent]:
        if self._output:
            yield NamedEvent(type=f"{self._output[-1]['type']}.end")

    def _ended(self, result: Result) -> dict[str, Any]:
        """The complete answer, which is stored."""
        said = {kind: "".join(item["content"] for item in self._output if item["type"] == kind)
                for kind in ("message", "reasoning")}  # fmt: skip
        body: dict[str, Any] = {
            "model_instance_id": self.head.model,
            "output": self._output,
            "stats": {
                "input_tokens": result.stats.num_prompt_tokens,
                "total_output_tokens": result.stats.num_generated_tokens,
                "reasoning_output_tokens": self._reading.count(result.tokens, self.head.texts, thinks=result.thinks),
                "tokens_per_second": _speed_of(result),
                "time_to_first_token_seconds": result.stats.time_to_first_token,
            },
        }
        if self._others["is_stored"]:
            turn = {"role": "assistant", "content": said["message"]}
            turn |= {"reasoning_content": said["reasoning"]} if said["reasoning"] else {}
            self.head.conversations.add(self.head.id, [*self._turns, turn], self._others["previous"])
            body["response_id"] = self.head.id
        return body


def _content(given: Any) -> Any:
    """The message's content: a text, or texts and images."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise ApiError(400, "'input' is not a text or a list of items.", param="input", code="invalid_type")
    parts = []
    for i, item in enumerate(given):
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind in ("text", "message"):
            parts.append({"type": "text", "text": item.get("content")})
        elif kind == "image":
            parts.append({"type": "image_url", "image_url": {"url": item.get("data_url")}})
        else:
            message = f"'input[{i}]' is no item of type message or image. Send those."
            raise ApiError(400, message, param=f"input[{i}]", code="invalid_type")
    return parts


def _reasoning(asked: Any) -> dict[str, Any]:
    if asked is None:
        return {}
    if asked in ("off", "on"):
        return {"enable_thinking": asked == "on"}
    return {"reasoning_effort": asked}
