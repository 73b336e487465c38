"""From a request's fields to prompts and the engine's options."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import msgspec

from outrider.config import without_word
from outrider.server.errors import ApiError
from outrider.server.protocol.requests import (
    MOST_CHOICES,
    SERVED,
    Asked,
    CalledFunction,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Generation,
    ImagePart,
    JsonObject,
    JsonSchema,
    TextPart,
    Tool,
    ToolChoice,
)
from outrider.system.nesting import TooDeep, check_json


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to generate: a prompt as `Engine.submit` takes it, and its options."""

    prompt: Any
    options: dict[str, Any]


def with_adapter(choice: Choice, adapter: str) -> Choice:
    """The same answer with the adapter that the model's name has.

    Raises:
        ApiError: with status 400, if the request names another one.
    """
    asked = choice.options.get("adapter", adapter)
    if asked != adapter:
        message = f"The model's name says adapter '{adapter}', and the field says {asked!r}. Leave one out."
        raise ApiError(400, message, param="adapter", code="invalid_value")
    return Choice(choice.prompt, choice.options | {"adapter": adapter})


def choices_of_chat(request: ChatRequest) -> list[Choice]:
    """The n answers of a chat.

    Raises:
        ApiError: with status 400, for fields that contradict each other.
    """
    options = _options(request)
    _set(options, "max_new_tokens", _one_of(request, "max_tokens", "max_completion_tokens"))
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs is not None:
        raise ApiError(400, "top_logprobs needs logprobs: set it to true.", param="top_logprobs", code="invalid_value")
    if request.prediction is not None:
        predicted = _text(request.prediction.content)
        options["references"] = ([predicted] if predicted else []) + options.get("references", [])
    if request.tools or request.tool_choice is not None:
        options |= _tools(request.tools or [], request.tool_choice)
        _set(options, "parallel_tool_calls", request.parallel_tool_calls)
    messages = [_turn(message, i) for i, message in enumerate(request.messages)]
    return _repeat([(messages, True)], request, options)


def choices_of_completion(request: CompletionRequest) -> list[Choice]:
    """The n answers of each prompt, those of one prompt in a row."""
    options = _options(request)
    _set(options, "max_new_tokens", request.max_tokens)
    _set(options, "logprobs", request.logprobs)
    return _repeat([(prompt, False) for prompt in _prompts(request.prompt)], request, options)


def _repeat(prompts: list[tuple[Any, bool]], request: Generation, options: dict[str, Any]) -> list[Choice]:
    """Each prompt n times, with seeds one after the other."""
    made = []
    for prompt, chat_template in prompts:
        for i in range(request.n or 1):
            seed = {} if request.seed is None else {"seed": (request.seed + i) % 2**64}
            made.append(Choice(prompt, options | seed | {"chat_template": chat_template}))
    return made


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    token_ids = [item for item in prompt if isinstance(item, int)]
    if token_ids and len(token_ids) == len(prompt):
        return [token_ids]
    if len(prompt) > MOST_CHOICES:
        message = f"{len(prompt):,} prompts are more than a request may have, {MOST_CHOICES}. Send several requests."
        raise ApiError(400, message, param="prompt", code="invalid_value")
    made = [item for item in prompt if not isinstance(item, int)]
    if token_ids or len({type(item) for item in made}) != 1:
        message = "The prompt is a text, a list of texts, a list of token ids, or a list of such lists, and not empty."
        raise ApiError(400, message, param="prompt", code="invalid_type")
    return made


def options_of(request: Asked) -> dict[str, Any]:
    """The engine's options that all requests have.

    Raises:
        ApiError: with status 400, for two names of one option with different values.
    """
    given = {name: getattr(request, name) for name in SERVED} | {"drafter": _one_of(request, "drafter", "draft_model")}
    options = {name: without_word(name, value) for name, value in given.items() if value is not None}
    if request.seed is not None:
        options["seed"] = request.seed % 2**64  # OpenAI's may be negative
    return options


def _options(request: Generation) -> dict[str, Any]:
    options = options_of(request)
    _set(options, "logprobs_of", request.logprobs_of)
    form = request.response_format
    if isinstance(form, JsonSchema):
        options["json_schema"] = form.json_schema.schema
    elif isinstance(form, JsonObject):
        options["json_schema"] = True
    return options


def _one_of(request: Asked, name: str, other: str) -> Any:
    """The value of a field that has two names.

    Raises:
        ApiError: with status 400, if both are given and differ.
    """
    one, two = getattr(request, name), getattr(request, other)
    if one is not None and two is not None and one != two:
        message = f"{name}={one!r} and {other}={two!r} are two names for one option. Leave one out."
        raise ApiError(400, message, param=other, code="invalid_value")
    return two if one is None else one


def _set(options: dict[str, Any], name: str, value: object) -> None:
    if value is not None:
        options[name] = value


def _tools(tools: list[Tool], choice: str | ToolChoice | None) -> dict[str, Any]:
    chosen = choice or "auto"
    if not isinstance(chosen, str):
        chosen = chosen.function.name
    return {"tools": msgspec.to_builtins(tools), "tool_choice": chosen}


def _turn(message: ChatMessage, place: int) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise ApiError(400, "A message needs a content.", param=f"messages[{place}].content", code="invalid_type")
    turn: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,  # templates know the older word
        "content": _content(message.content or ""),
    }
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _called(call.function)} for call in message.tool_calls
        ]
    others = {"name": message.name, "tool_call_id": message.tool_call_id}
    return turn | {name: value for name, value in others.items() if value is not None}


def _called(function: CalledFunction) -> dict[str, Any]:
    return {"name": function.name, "arguments": arguments_of(function.arguments)}


def arguments_of(written: str) -> Any:
    """Arguments of a call for the chat template, which writes them as JSON itself."""
    try:
        check_json(written)
        return msgspec.json.decode(written)
    except (msgspec.DecodeError, TooDeep):
        return written  # cut off by a token limit, say; what is too deep, the tokenizer refuses


def _content(content: str | list[TextPart | ImagePart]) -> str | list[dict[str, Any]]:
    """A message's content: a text, or its parts if there is an image among them."""
    if not isinstance(content, str) and any(isinstance(part, ImagePart) for part in content):
        parts: list[dict[str, Any]] = msgspec.to_builtins(content)
        return parts
    return _text(content)


def _text(content: str | Seq[TextPart | ImagePart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content if isinstance(part, TextPart))
