"""Tokens of texts and prompts without an answer, as clients of llama.cpp, vLLM, OpenAI and Anthropic ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeAlias, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from outrider.engine.engine import Engine
from outrider.server.endpoint import Service, as_json, read_json
from outrider.server.errors import ApiError
from outrider.server.messages import read_message_fields
from outrider.server.models import Model
from outrider.server.options import AnswerChoice, choices_of_chat
from outrider.server.protocol.items import ResponseRequest
from outrider.server.protocol.reading import read_fields
from outrider.server.protocol.requests import ChatRequest, NotNegative
from outrider.server.responses import chat_of_items

_OPENAI = {"object": "response.input_tokens"}
_OF_TOKENS = ("return_token_strs", "add_special_tokens")  # of a chat that is not answered


class TextToTokenize(msgspec.Struct, frozen=True):
    """A text: `content` as llama.cpp calls it, or vLLM's `prompt`. add_special, add_special_tokens: begin as every
    prompt does; llama.cpp's default is no, vLLM's is yes. with_pieces, return_token_strs: give the tokens' texts, too.
    parse_special: special tokens are read as such, which is always done.
    """

    content: str | None = None
    prompt: str | None = None
    model: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None


class TokensToRead(msgspec.Struct, frozen=True):
    """Token ids, whose text is asked for."""

    tokens: Annotated[list[NotNegative], msgspec.Meta(max_length=1 << 20)]
    model: str | None = None


Task: TypeAlias = tuple[Model, Callable[[Engine], Any]]  # what a model's engine is to make, in a thread


def tokenizing_routes(service: Service) -> list[BaseRoute]:
    """The addresses."""
    tasks: dict[str, Callable[[Service, dict[str, Any]], Task]] = {
        "/tokenize": _tokenize,
        "/detokenize": _detokenize,
        "/apply-template": _apply_template,
        "/v1/chat/completions/input_tokens": partial(_count, _chat_of, _OPENAI),
        "/v1/responses/input_tokens": partial(_count, _chat_of_items, _OPENAI),
        "/v1/messages/count_tokens": partial(_count, lambda _, fields: read_message_fields(fields), {}),
    }
    return [Route(path, partial(_answer, task, service), methods=["POST"]) for path, task in tasks.items()]


async def _answer(read: Callable[[Service, dict[str, Any]], Task], service: Service, request: Request) -> Response:
    model, work = await read_json(service, request, partial(read, service))
    async with service.models.use(model) as engine:
        return as_json(await asyncio.to_thread(work, engine))


def _tokenize(service: Service, fields: dict[str, Any]) -> Task:
    if "messages" in fields:
        strings = bool(fields.get("return_token_strs"))
        for name in _OF_TOKENS:
            fields.pop(name, None)
        asked = read_fields(fields, ChatRequest)
        of_chat, choice = service.models.find(asked.model), choices_of_chat(asked)[0]
        return of_chat, lambda engine: _counted(of_chat, _token_ids(engine, choice), strings=strings)
    text = read_fields(fields, TextToTokenize)
    if text.parse_special is False:
        message = "parse_special=false is not supported: special tokens are read as such. Leave it out."
        raise ApiError(400, message, param="parse_special", code="unsupported_field")
    given = text.prompt if text.content is None else text.content
    if given is None:
        message = "There is no text. Send it as content or prompt, or messages."
        raise ApiError(400, message, param="content", code="invalid_type")
    whole = text.add_special if text.add_special is not None else text.add_special_tokens
    begins = text.content is None if whole is None else whole
    model = service.models.find(text.model or "")

    def tokens(engine: Engine) -> dict[str, Any]:
        token_ids = _encoded(engine, given, begins=begins)
        if text.content is None:
            return _counted(model, token_ids, strings=bool(text.return_token_strs))
        return {"tokens": [_piece(model, token_id) for token_id in token_ids] if text.with_pieces else token_ids}

    return model, tokens


def _piece(model: Model, token_id: int) -> dict[str, Any]:
    """A token as llama.cpp says it: its text, or its bytes if it is part of a character."""
    piece = model.texts.spelled([token_id])
    return {"id": token_id, "piece": (model.texts.bytes_of(token_id) or piece) if "\ufffd" in piece else piece}


def _encoded(engine: Engine, text: str, *, begins: bool) -> list[int]:
    """A text's tokens. begins: with those that every prompt begins with."""
    if not text:
        return []
    token_ids, prefix = engine.encode_prompt(text, chat_template=False), list(engine.tokenizer.prefix)
    is_added = not begins and token_ids[: len(prefix)] == prefix
    return token_ids[len(prefix) :] if is_added else token_ids


def _counted(model: Model, token_ids: list[int], *, strings: bool) -> dict[str, Any]:
    """As vLLM says it."""
    texts = [model.texts.spelled([token_id]) for token_id in token_ids] if strings else None
    size = {"count": len(token_ids), "max_model_len": model.info.max_model_len}
    return size | {"tokens": token_ids, "token_strs": texts}


def _detokenize(service: Service, fields: dict[str, Any]) -> Task:
    asked = read_fields(fields, TokensToRead)
    model = service.models.find(asked.model or "")
    size = model.bundle.manifest.main.vocab_size
    if (wrong := next((each for each in asked.tokens if each >= size), None)) is not None:
        message = f"{wrong} is no token of this model, which has {size:,}. Send ids below that."
        raise ApiError(400, message, param="tokens", code="invalid_value")
    # llama.cpp's name and vLLM's
    return model, lambda _: dict.fromkeys(("content", "prompt"), model.texts.spelled(asked.tokens))


def _apply_template(service: Service, fields: dict[str, Any]) -> Task:
    asked = _chat_of(service, fields)
    choice = choices_of_chat(asked)[0]
    return service.models.find(asked.model), lambda engine: {"prompt": engine.render(choice.prompt, **_options(choice))}


def _chat_of(_: Service, fields: dict[str, Any]) -> ChatRequest:
    return read_fields(fields, ChatRequest)


def _chat_of_items(service: Service, fields: dict[str, Any]) -> ChatRequest:
    return cast("ChatRequest", chat_of_items(read_fields(fields, ResponseRequest), service.conversations).request)


def _count(
    read: Callable[[Service, dict[str, Any]], ChatRequest],
    more: dict[str, str],
    service: Service,
    fields: dict[str, Any],
) -> Task:
    """The number of a chat's tokens. more: other fields of the body."""
    asked = read(service, fields)
    (model, _), choice = service.models.find_adapted(asked.model), choices_of_chat(asked)[0]
    return model, lambda engine: {**more, "input_tokens": len(_token_ids(engine, choice))}


def _token_ids(engine: Engine, choice: AnswerChoice) -> list[int]:
    return engine.encode_prompt(choice.prompt, **_options(choice))


def _options(choice: AnswerChoice) -> dict[str, Any]:
    return {name: value for name, value in choice.options.items() if name not in ("fits", "chat_template")}
